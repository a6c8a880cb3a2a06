"""Qwen3 from scratch, with PyTorch's attention or ours.

    python examples/qwen3.py                        random weights: the 0.6B shape on a GPU,
                                                    a tiny one on a CPU
    python examples/qwen3.py path/to/Qwen3-0.6B     a published checkpoint folder (config.json and
                                                    *.safetensors; needs the package safetensors,
                                                    and tokenizers to read and write text)
    python examples/qwen3.py --attention ours       time one of the two only

Prints the time of the prompt (prefill), the tokens per second after it (decode), and the largest
difference between the logits of the two. Tensors are (batch, seqlen, heads, head_dim).
"""

import argparse
import json
import sys
import time
from dataclasses import dataclass, fields
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from flashattn_ext import flash_attn_func


@dataclass
class Config:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int = 128
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6
    tie_word_embeddings: bool = True


QWEN3_0_6B = Config(151936, 1024, 3072, 28, 16, 8)
TINY = Config(512, 128, 256, 3, 8, 2, head_dim=32)


def attention_torch(query, key, value):
    """Causal attention of the last queries, by PyTorch: the last query sees the last key."""
    seqlen_q, seqlen_k = query.shape[1], key.shape[1]
    mask = None
    if 1 < seqlen_q < seqlen_k:  # is_causal would let query 0 see key 0 only
        mask = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=query.device)
        mask = mask.tril(seqlen_k - seqlen_q)
    out = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (query, key, value)),
        attn_mask=mask,
        is_causal=seqlen_q == seqlen_k,
        enable_gqa=True,
    )
    return out.transpose(1, 2)


def attention_ours(query, key, value):
    """The same by our kernel, whose causal rule aligns the last query with the last key."""
    return flash_attn_func(query, key, value, causal=True)


ATTENTION = {"torch": attention_torch, "ours": attention_ours}


class KVCache:
    """Keys and values of all layers, allocated once for max_length tokens."""

    def __init__(self, model, batch, max_length):
        config = model.config
        heads = (config.num_key_value_heads, config.head_dim)
        self.keys = model.norm.weight.new_empty(config.num_hidden_layers, batch, max_length, *heads)
        self.values = torch.empty_like(self.keys)
        self.length = 0  # tokens that every layer holds

    def append(self, layer, key, value):
        """Writes the new tokens of one layer; returns views of all its tokens so far."""
        end = self.length + key.shape[1]
        if end > self.keys.shape[2]:
            raise RuntimeError(f"cache: holds {self.keys.shape[2]} tokens, got {end}")
        self.keys[layer, :, self.length : end] = key
        self.values[layer, :, self.length : end] = value
        return self.keys[layer, :, :end], self.values[layer, :, :end]


class RMSNorm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def rotate(x, cos, sin):
    """Rotary position embedding: turns each pair (x[i], x[i + head_dim / 2]) by its angle."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        size_q = config.num_attention_heads * config.head_dim
        size_k = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, size_q, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, size_k, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, size_k, bias=False)
        self.o_proj = nn.Linear(size_q, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, x, cos, sin, cache, attention):
        heads = (*x.shape[:2], -1, self.head_dim)
        query = rotate(self.q_norm(self.q_proj(x).view(heads)), cos, sin)
        key = rotate(self.k_norm(self.k_proj(x).view(heads)), cos, sin)
        key, value = cache.append(self.layer, key, self.v_proj(x).view(heads))
        return self.o_proj(attention(query, key, value).flatten(2))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x, *args):
        x = x + self.self_attn(self.input_layernorm(x), *args)
        return x + self.mlp(self.post_attention_layernorm(x))


class Qwen3(nn.Module):
    """Parameter names are those of the published checkpoints, without their prefix "model."."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, tokens, cache, attention, keep=1):
        """Logits (batch, keep, vocab_size) of the last ``keep`` of the new tokens.

        tokens: (batch, seqlen), which follow those in the cache and are added to it.
        """
        x = self.embed_tokens(tokens)
        steps = torch.arange(0, self.config.head_dim, 2, device=x.device) / self.config.head_dim
        position = torch.arange(cache.length, cache.length + tokens.shape[1], device=x.device)
        angle = position[:, None, None] * self.config.rope_theta**-steps  # (seqlen, 1, head_dim/2)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin, cache, attention)
        cache.length += tokens.shape[1]
        return self.lm_head(self.norm(x[:, -keep:]))


def random_model(config, device, dtype):
    with torch.device(device):
        model = Qwen3(config).to(dtype)
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            nn.init.normal_(parameter, std=0.02)
    return model


def load_config(folder):
    raw = json.loads((folder / "config.json").read_text())
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}  # newer and older files
    if raw["model_type"] != "qwen3" or raw.get("use_sliding_window"):
        raise SystemExit(f"{folder}: only dense Qwen3 without sliding windows can be loaded")
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise SystemExit(f"{folder}: only plain rotary embeddings can be loaded, got {rope}")
    raw["rope_theta"] = raw.get("rope_theta") or rope["rope_theta"]
    return Config(**{field.name: raw[field.name] for field in fields(Config) if field.name in raw})


def load_model(folder, device, dtype):
    """Reads one checkpoint folder, sharded or not, straight into place on the device."""
    from safetensors import safe_open

    with torch.device("meta"):
        model = Qwen3(load_config(folder))
    files = [folder / "model.safetensors"]
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = set(json.loads(index.read_text())["weight_map"].values())
        files = [folder / shard for shard in sorted(shards)]
    weights = {}
    for number, file in enumerate(files):
        progress("loading", number, len(files))
        with safe_open(file, framework="pt", device=str(device)) as shard:
            for name in shard.keys():  # noqa: SIM118 (shard is no dict)
                weights[name.removeprefix("model.")] = shard.get_tensor(name).to(dtype)
    if model.config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["embed_tokens.weight"]
    model.load_state_dict(weights, assign=True)
    if model.config.tie_word_embeddings:
        model.lm_head.weight = model.embed_tokens.weight
    return model


def load_tokenizer(folder):
    """The checkpoint's tokenizer, or None without its file or without the package tokenizers."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return None
    file = folder / "tokenizer.json"
    return Tokenizer.from_file(str(file)) if file.is_file() else None


def progress(what, done, total):
    """One line on the terminal that overwrites itself; cleared when all is done."""
    if sys.stderr.isatty():
        text = f"{what} {done}/{total}" if done < total else ""
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def prefill(model, tokens, cache, attention, chunk, keep=1):
    """Logits of the last ``keep`` prompt tokens; the prompt goes in ``chunk`` tokens at a time."""
    for piece in tokens.split(chunk, dim=1):
        progress("prompt token", cache.length, tokens.shape[1])
        logits = model(piece, cache, attention, keep)
    progress("prompt token", cache.length, tokens.shape[1])
    return logits


def generate(model, tokens, new_tokens, attention, chunk):
    """Greedy continuation: (the new tokens, prefill seconds, decode tokens per second)."""
    cache = KVCache(model, tokens.shape[0], tokens.shape[1] + new_tokens)
    start = clock(tokens.device)
    token = prefill(model, tokens, cache, attention, chunk).argmax(-1)
    prefilled = clock(tokens.device)
    new = [token]
    for step in range(1, new_tokens):
        progress("new token", step, new_tokens)
        token = model(token, cache, attention).argmax(-1)
        new.append(token)
    progress("new token", new_tokens, new_tokens)
    decoded = clock(tokens.device)
    return torch.cat(new, 1), prefilled - start, (new_tokens - 1) / (decoded - prefilled)


def clock(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@torch.inference_mode()
def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", nargs="?", type=Path, help="folder of a published Qwen3")
    parser.add_argument("--attention", choices=["torch", "ours", "both"], default="both")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=["float16", "bfloat16", "float32"])
    parser.add_argument("--prompt", default="Attention is all you need, because")
    parser.add_argument("--prompt-length", type=int, help="random tokens instead of a text")
    parser.add_argument("--new-tokens", type=int, help="at least 2")
    parser.add_argument("--chunk", type=int, default=8192, help="prompt tokens per forward pass")
    args = parser.parse_args()
    device = torch.device(args.device)
    on_gpu = device.type == "cuda"
    dtype = getattr(torch, args.dtype or ("bfloat16" if on_gpu else "float32"))
    new_tokens = args.new_tokens or (64 if on_gpu else 16)

    torch.manual_seed(0)
    tokenizer = None
    if args.checkpoint:
        model = load_model(args.checkpoint, device, dtype)
        tokenizer = load_tokenizer(args.checkpoint)
    else:
        model = random_model(QWEN3_0_6B if on_gpu else TINY, device, dtype)
    if tokenizer and not args.prompt_length:
        tokens = torch.tensor([tokenizer.encode(args.prompt).ids], device=device)
    else:
        length = args.prompt_length or (2048 if on_gpu else 128)
        tokens = torch.randint(model.config.vocab_size, (1, length), device=device)

    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    where = torch.cuda.get_device_name(device) if on_gpu else "the CPU"
    print(f"Qwen3 of {millions:,.1f} million parameters", end="")
    print(f" from {args.checkpoint}" if args.checkpoint else ", random weights", end="")
    print(f", {str(dtype).removeprefix('torch.')} on {where}")
    print(f"{tokens.shape[1]} prompt tokens, {new_tokens} new tokens\n")

    # The last prompt tokens' logits of both; also the warm-up for the times.
    logits, new = {}, {}
    for name, attention in ATTENTION.items():
        cache = KVCache(model, *tokens.shape)
        logits[name] = prefill(model, tokens, cache, attention, args.chunk, keep=256).float()
    print(f"{'attention':<10}{'prefill':>12}{'decode':>18}")
    for name in ATTENTION if args.attention == "both" else [args.attention]:
        for _ in range(2 if on_gpu else 1):  # the first run on a GPU also pays for plans and caches
            result = generate(model, tokens, new_tokens, ATTENTION[name], args.chunk)
        new[name], seconds, rate = result
        print(f"{name:<10}{seconds * 1e3:>9.1f} ms{rate:>9.1f} tokens/s")

    difference = (logits["torch"] - logits["ours"]).abs().max().item()
    largest = logits["torch"].abs().max().item()
    print(f"\nlargest logit difference: {difference:.2g} (logits reach {largest:.3g})")
    if args.attention == "both":
        same = (new["torch"] == new["ours"])[0].long().cumprod(0).sum().item()
        print(f"equal greedy tokens: the first {same} of {new_tokens}")
    if tokenizer:
        for name, ids in new.items():
            print(f"\n{name}: {tokenizer.decode(torch.cat([tokens, ids], 1)[0].tolist())}")


if __name__ == "__main__":
    main()
