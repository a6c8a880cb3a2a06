"""Qwen3 from scratch, with PyTorch's attention or ours.

    python examples/qwen3.py                      random weights: 0.6B shape on a GPU, tiny on a CPU
    python examples/qwen3.py path/to/Qwen3-0.6B   a published checkpoint folder (config.json and
                                                  *.safetensors; needs the package safetensors)

Prints for each the time of the prompt (prefill) and the tokens per second after it (decode), then
the largest difference between their logits. Tensors are (batch, seqlen, heads, head_dim).
"""

import argparse
import json
import time
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from flashattn_ext import flash_attn_func, flash_attn_with_kvcache


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


def attention_torch(query, key, value, cache, layer):
    """Causal attention of the newest tokens, which it adds to the cache: the last query is aligned
    with the last key."""
    q, k, v = (x.transpose(1, 2) for x in (query, *cache.append(layer, key, value)))
    new, total = q.shape[2], k.shape[2]
    mask = None
    if 1 < new < total:  # is_causal would let query 0 see key 0 only
        mask = torch.ones(new, total, dtype=torch.bool, device=q.device).tril(total - new)
    out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=new == total, enable_gqa=True)
    return out.transpose(1, 2)


def attention_ours(query, key, value, cache, layer):
    """The same; one new token is written to the cache and reads it in one call."""
    if query.shape[1] > 1:
        return flash_attn_func(query, *cache.append(layer, key, value), causal=True)
    cache.check_room(1)
    keys, values = cache.keys[layer], cache.values[layer]
    return flash_attn_with_kvcache(query, keys, values, key, value, cache_seqlens=cache.lengths)


ATTENTION = {"torch": attention_torch, "ours": attention_ours}
Linear = partial(nn.Linear, bias=False)


class KVCache:
    def __init__(self, model, batch, max_length):
        """Makes room for the keys and values of all layers."""
        heads = (model.config.num_key_value_heads, model.config.head_dim)
        shape = (model.config.num_hidden_layers, batch, max_length, *heads)
        self.keys, self.values = (model.norm.weight.new_empty(shape) for _ in range(2))
        self.length = 0  # tokens that every layer holds
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=self.keys.device)  # for kernels

    def check_room(self, new):
        if self.length + new > self.keys.shape[2]:
            raise RuntimeError(f"cache: holds {self.keys.shape[2]} tokens, got {self.length + new}")

    def append(self, layer, key, value):
        """Writes the new tokens of one layer; returns views of all its tokens so far."""
        self.check_room(key.shape[1])
        end = self.length + key.shape[1]
        self.keys[layer, :, self.length : end] = key
        self.values[layer, :, self.length : end] = value
        return self.keys[layer, :, :end], self.values[layer, :, :end]

    def advance(self, new):
        """After the last layer."""
        self.length += new
        self.lengths += new


class RMSNorm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):
        scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * (x.float() * scale).to(x.dtype)


def rotate(x, cos, sin):
    """Rotary position embedding: turns each pair (x[i], x[i + head_dim / 2]) by its angle."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        self.q_proj = Linear(config.hidden_size, config.num_attention_heads * config.head_dim)
        self.k_proj = Linear(config.hidden_size, config.num_key_value_heads * config.head_dim)
        self.v_proj = Linear(config.hidden_size, config.num_key_value_heads * config.head_dim)
        self.o_proj = Linear(config.num_attention_heads * config.head_dim, config.hidden_size)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, x, cos, sin, cache, attention):
        heads = (*x.shape[:2], -1, self.head_dim)
        query = rotate(self.q_norm(self.q_proj(x).view(heads)), cos, sin)
        key = rotate(self.k_norm(self.k_proj(x).view(heads)), cos, sin)
        value = self.v_proj(x).view(heads)
        return self.o_proj(attention(query, key, value, cache, self.layer).flatten(2))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # SwiGLU


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
    def __init__(self, config):
        """Parameters are named as in the published checkpoints, without the prefix "model."."""
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, tokens, cache, attention, keep=1):
        """Adds tokens (batch, seqlen) to the cache; returns the logits of the last ``keep``."""
        x = self.embed_tokens(tokens)
        steps = torch.arange(0, self.config.head_dim, 2, device=x.device) / self.config.head_dim
        position = torch.arange(cache.length, cache.length + tokens.shape[1], device=x.device)
        angle = position[:, None, None] * self.config.rope_theta**-steps  # (seqlen, 1, head_dim/2)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin, cache, attention)
        cache.advance(tokens.shape[1])
        return self.lm_head(self.norm(x[:, -keep:]))


def random_model(config, device, dtype):
    with torch.device(device):
        model = Qwen3(config).to(dtype)
    for parameter in model.parameters():
        if parameter.dim() == 2:  # all but the norms
            nn.init.normal_(parameter, std=0.02)
    return model


def load_config(folder):
    raw = json.loads((folder / "config.json").read_text())
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}  # newer and older files
    plain_rope = rope.get("rope_type", rope.get("type", "default")) == "default"
    if raw["model_type"] != "qwen3" or raw.get("use_sliding_window") or not plain_rope:
        raise SystemExit(f"{folder}: only dense Qwen3 with plain RoPE, no window, can be loaded")
    raw["rope_theta"] = raw.get("rope_theta") or rope["rope_theta"]
    return Config(**{field.name: raw[field.name] for field in fields(Config) if field.name in raw})


def load_model(folder, device, dtype):
    from safetensors.torch import load_file

    with torch.device("meta"):  # no memory until the weights come
        model = Qwen3(load_config(folder))
    weights = {}
    for shard in folder.glob("model*.safetensors"):
        for name, tensor in load_file(shard, device=str(device)).items():
            weights[name.removeprefix("model.")] = nn.Parameter(tensor.to(dtype))
    if model.config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["embed_tokens.weight"]
    model.load_state_dict(weights, assign=True)  # an error names missing weights
    return model


def generate(model, tokens, new_tokens, attention):
    """Greedy continuation: (new tokens on the CPU, prefill seconds, decode tokens per second)."""
    cache = KVCache(model, tokens.shape[0], tokens.shape[1] + new_tokens)
    new, times = [], [time.perf_counter()]
    for _ in range(new_tokens):
        tokens = model(tokens, cache, attention).argmax(-1)
        new.append(tokens.cpu())  # waits for the GPU
        times.append(time.perf_counter())
    return torch.cat(new, 1), times[1] - times[0], (new_tokens - 1) / (times[-1] - times[1])


@torch.inference_mode()
def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", nargs="?", type=Path, help="folder of a published Qwen3")
    parser.add_argument("--attention", choices=list(ATTENTION), help="time this one only")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--prompt-length", type=int, default=512, help="random tokens")
    parser.add_argument("--new-tokens", type=int, default=32, help="at least 2")
    args = parser.parse_args()
    if args.new_tokens < 2:
        parser.error(f"--new-tokens: must be at least 2, got {args.new_tokens}")
    torch.manual_seed(0)
    on_gpu = args.device.startswith("cuda")
    dtype = torch.bfloat16 if on_gpu else torch.float32
    if args.checkpoint:
        model = load_model(args.checkpoint, args.device, dtype)
    else:
        model = random_model(QWEN3_0_6B if on_gpu else TINY, args.device, dtype)
    tokens = torch.randint(model.config.vocab_size, (1, args.prompt_length), device=args.device)
    print(f"Qwen3 from {args.checkpoint or 'random weights'}, {dtype} on {args.device}\n")
    print(f"{'attention':<10}{'prefill':>12}{'decode':>18}")
    for name in [args.attention] if args.attention else ATTENTION:
        for _ in range(2):  # the first is the warm-up
            _, seconds, rate = generate(model, tokens, args.new_tokens, ATTENTION[name])
        print(f"{name:<10}{seconds * 1e3:>9.1f} ms{rate:>9.1f} tokens/s")
    logits = []
    for attention in ATTENTION.values():
        logits.append(model(tokens, KVCache(model, *tokens.shape), attention, keep=256).float())
    print(f"\nlargest logit difference: {(logits[0] - logits[1]).abs().max().item():.2g}")


if __name__ == "__main__":
    main()
