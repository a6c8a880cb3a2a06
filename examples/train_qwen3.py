"""Trains a small Qwen3 of Hugging Face transformers twice: with our attention and with PyTorch's.

    python examples/train_qwen3.py                     a minute on a GPU
    python examples/train_qwen3.py --device cpu        a tiny model, seconds

Both start from the same weights and see the same batches: bytes of the Python standard library's
source. Prints for each the tokens per second and the final loss, then the largest difference of the
losses in a step, and draws both curves into one picture. Needs the packages transformers (5.0 or
newer), matplotlib and tqdm.
"""

import argparse
import sysconfig
import time
from pathlib import Path

import matplotlib
import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, Qwen3Config
from transformers.utils import logging

import flashattn_ext.transformers

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# A vocabulary of bytes; heads as in Qwen3-0.6B, half as many.
SMALL = dict(
    vocab_size=256,
    hidden_size=512,
    intermediate_size=1536,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=128,
    tie_word_embeddings=False,
    use_cache=False,
)
TINY = SMALL | dict(
    hidden_size=64,
    intermediate_size=128,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
)


def python_source():
    """The modules of the standard library, some megabytes, as a tensor of bytes."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)


def batches(text, args):
    """Yields (batch, seqlen) tokens, in every run the same."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(args.steps):
        starts = torch.randint(len(text) - args.seqlen, (args.batch, 1), generator=generator)
        yield text[starts + torch.arange(args.seqlen)].long().to(args.device)


def train(attention, config, text, args):
    """Returns the loss of every step and the tokens per second after the first tenth."""
    torch.manual_seed(0)
    with args.device:
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95))
    warmup = max(1, args.steps // 10)  # of the learning rate; also what is not timed
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min(1, (i + 1) / warmup))
    losses = torch.zeros(args.steps, device=args.device)
    bar = tqdm(batches(text, args), total=args.steps, desc=attention, unit="step")
    for step, tokens in enumerate(bar):
        if step == warmup:
            start = time.perf_counter()
        with torch.autocast(args.device.type, torch.bfloat16):
            loss = model(tokens, labels=tokens).loss  # of predicting the next byte
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses[step] = loss.detach()
        if step % 10 == 0 or step == warmup - 1:
            bar.set_postfix(loss=f"{losses[step].item():.3f}")  # waits for the GPU
    losses = losses.cpu()
    seconds = time.perf_counter() - start
    return losses, (args.steps - warmup) * args.batch * args.seqlen / seconds


def plot(losses, title, path):
    """Both curves, and below them how far apart they are."""
    figure, (top, bottom) = plt.subplots(
        2, 1, sharex=True, figsize=(8, 6), height_ratios=[3, 1], layout="constrained"
    )
    for (name, curve), color, style in zip(
        losses.items(), ("#0072B2", "#D55E00"), ("-", "--"), strict=True
    ):
        top.plot(curve.tolist(), color=color, linestyle=style, label=name)
    top.set_ylabel("loss, nats per byte")
    top.legend()
    torchs, ours = losses.values()
    bottom.plot((ours - torchs).tolist(), color="#999999")
    bottom.set_ylabel("ours - torch")
    bottom.set_xlabel("step")
    for axis in (top, bottom):
        axis.grid(alpha=0.3)
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, help="at least 2; 300 on a GPU, else 20")
    parser.add_argument("--seqlen", type=int, help="bytes in a sequence; 4096 on a GPU, else 128")
    parser.add_argument("--batch", type=int, default=4, help="sequences in a step")
    parser.add_argument("--layers", type=int, help="8 on a GPU, else 2")
    parser.add_argument("--lr", type=float, default=6e-4, help="learning rate")
    parser.add_argument("--out", type=Path, default="train_qwen3.png", help="the picture")
    args = parser.parse_args()
    args.device = torch.device(args.device)
    on_gpu = args.device.type == "cuda"
    args.steps = args.steps or (300 if on_gpu else 20)
    args.seqlen = args.seqlen or (4096 if on_gpu else 128)
    if args.steps < 2:
        parser.error(f"--steps: must be at least 2, got {args.steps}")

    logging.set_verbosity_error()
    ours = flashattn_ext.transformers.register()  # "fa_ext"
    layers = args.layers or (8 if on_gpu else 2)
    config = Qwen3Config(**(SMALL if on_gpu else TINY), num_hidden_layers=layers)
    text = python_source()
    where = torch.cuda.get_device_name(args.device) if on_gpu else "the CPU"
    print(f"Qwen3 of {layers} layers, head_dim {config.head_dim}, bfloat16 autocast on {where}")
    print(f"{args.steps} steps of {args.batch} x {args.seqlen} bytes, ", end="")
    print(f"out of {len(text) / 1e6:.1f} million\n", flush=True)

    losses, rates = {}, {}
    for name, attention in (("torch", "sdpa"), ("ours", ours)):
        losses[name], rates[name] = train(attention, config, text, args)
    print(f"\n{'attention':<11}{'tokens/s':>10}{'first loss':>13}{'final loss':>13}")
    for name, curve in losses.items():
        final = curve[-max(1, args.steps // 20) :].mean()  # of the last steps
        print(f"{name:<11}{rates[name]:>10,.0f}{curve[0]:>13.4f}{final:>13.4f}")
    difference = (losses["ours"] - losses["torch"]).abs()
    step = difference.argmax().item()
    print(f"\nlargest difference of the losses: {difference[step]:.2g}, in step {step + 1}")
    plot(losses, f"Qwen3 on {where}, {args.batch} x {args.seqlen} bytes a step", args.out)
    print(f"curves: {args.out}")


if __name__ == "__main__":
    main()
