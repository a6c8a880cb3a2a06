"""Hugging Face transformers' Qwen3 with our attention beside its own "sdpa" and "eager".

    python examples/qwen3_transformers.py                       random weights: the 0.6B shape on a
                                                                GPU, a tiny one on a CPU
    python examples/qwen3_transformers.py path/to/Qwen3-0.6B    a checkpoint folder

Prints for each the time of the prompt, the largest logit difference from eager attention in
float32, and how many greedy tokens are the same. Needs the package transformers, 5.0 or newer.
"""

import argparse
import statistics
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config
from transformers.utils import logging

import flashattn_ext.transformers

QWEN3_0_6B = dict(
    vocab_size=151936,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    tie_word_embeddings=True,
    rope_parameters={"rope_type": "default", "rope_theta": 1e6},
)
TINY = QWEN3_0_6B | dict(
    vocab_size=512,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=32,
)


def cast_parameters(model, dtype):
    """Unlike model.to(dtype), leaves the float32 buffers of the rotary embedding alone."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def prefill_ms(model, tokens, repeats=5):
    """Median time of one forward pass over the prompt, in milliseconds, after a warm-up."""
    times = []
    for step in range(1 + repeats):
        if tokens.is_cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        model(tokens, logits_to_keep=1)
        if tokens.is_cuda:
            torch.cuda.synchronize()
        if step > 0:
            times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def greedy(model, tokens, count):
    new = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
    )
    return new[0, tokens.shape[1] :]


@torch.inference_mode()
def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", nargs="?", help="folder of a published Qwen3")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--prompt", default="Attention is all you need, because")
    parser.add_argument("--prompt-length", type=int, help="random tokens instead of a text")
    parser.add_argument("--new-tokens", type=int, default=32)
    args = parser.parse_args()
    device = torch.device(args.device)
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32

    logging.set_verbosity_error()
    name = flashattn_ext.transformers.register()  # "fa_ext"
    torch.manual_seed(0)
    tokenizer = None
    if args.checkpoint:
        model = AutoModelForCausalLM.from_pretrained(args.checkpoint, dtype=dtype).to(device)
        if not args.prompt_length:
            tokenizer = AutoTokenizer.from_pretrained(args.checkpoint)
    else:
        with device:
            config = Qwen3Config(**(QWEN3_0_6B if on_gpu else TINY))
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.eval()
    if tokenizer:
        tokens = tokenizer(args.prompt, return_tensors="pt").input_ids.to(device)
    else:
        length = args.prompt_length or (2048 if on_gpu else 128)
        tokens = torch.randint(model.config.vocab_size, (1, length), device=device)

    where = torch.cuda.get_device_name(device) if on_gpu else "the CPU"
    print(f"Qwen3 of {model.num_parameters() / 1e6:,.1f} million parameters", end="")
    print(f" from {args.checkpoint}" if args.checkpoint else ", random weights", end="")
    print(f", {str(dtype).removeprefix('torch.')} on {where}")
    print(f"{tokens.shape[1]} prompt tokens, {args.new_tokens} new tokens\n")

    model.set_attn_implementation("eager")
    cast_parameters(model, torch.float32)
    exact = model(tokens, logits_to_keep=64).logits
    cast_parameters(model, dtype)
    reference = greedy(model, tokens, args.new_tokens)
    print(f"{'attention':<11}{'prefill':>11}{'logit difference':>20}{'greedy tokens as eager':>26}")
    for attention in ("eager", "sdpa", name):
        model.set_attn_implementation(attention)  # also while the model is in use
        difference = (model(tokens, logits_to_keep=64).logits.float() - exact).abs().max().item()
        new = greedy(model, tokens, args.new_tokens)
        same = (new == reference).long().cumprod(0).sum().item()
        count = f"first {same} of {len(new)}"
        print(f"{attention:<11}{prefill_ms(model, tokens):>8.1f} ms{difference:>20.2g}{count:>26}")
    print(f"\nLogits reach {exact.abs().max().item():.3g}.")
    if tokenizer:
        print(f"\n{name}: {args.prompt}{tokenizer.decode(new)}")


if __name__ == "__main__":
    main()
