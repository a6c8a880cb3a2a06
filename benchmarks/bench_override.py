"""Plain torch code with and without flashattn_ext.enable().

    python benchmarks/bench_override.py --out benchmarks/results/override_h200.json --bars
    python benchmarks/bench_override.py --device cpu --quick

Two questions. What does a call of F.scaled_dot_product_attention cost the host (host_cost.py), of
one that trains and of one with a bool mask too? And how long does an unmodified Qwen3 of Hugging
Face transformers, of the size of Qwen3-0.6B and with random weights, take for a long prompt? Calls
with and without are interleaved. Exit code 1 if a result is wrong; with --bars also if one of the
bars for an H200 is missed.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict

import command
import harness
import host_cost
import torch
import torch.nn.functional as F
from bars import Bar, print_bars
from harness import Call
from workload import Inputs, Problem, input_sets

LABELS = {"ours": "enabled", "sdpa": "stock"}
# Of the logits; bfloat16 gives about 1e-4, a layer without its causal mask far more.
NORMALISED_DIFFERENCE = 1e-3
HOST, MODEL = "host", "model"


def gpu_problems() -> list[Problem]:
    host = functools.partial(Problem, HOST, batch=1, heads_q=16, heads_k=8, head_dim=128)
    short = {"seqlen_q": 128, "seqlen_k": 128}
    return [
        *(host("plain", **short, mask="causal", dtype=d) for d in (torch.float16, torch.bfloat16)),
        host("training", **short, mask="causal"),
        host("masked", **short, mask="bool"),
        host("decode", seqlen_q=1, seqlen_k=128, mask="bool"),
        Problem(MODEL, "qwen3-0.6b", 1, 16, 8, 16384, 16384, 128, "causal"),
    ]


def cpu_problems() -> list[Problem]:
    tiny = functools.partial(Problem, batch=1, heads_q=4, heads_k=2, head_dim=16)
    lengths = {"seqlen_q": 32, "seqlen_k": 32}
    return [
        tiny(HOST, "plain", **lengths, mask="causal", dtype=torch.float32),
        tiny(HOST, "training", **lengths, mask="causal", dtype=torch.float32),
        tiny(HOST, "masked", **lengths, mask="bool", dtype=torch.float32),
        tiny(MODEL, "qwen3-tiny", **lengths, mask="causal", dtype=torch.float32),
    ]


def enable(device: torch.device):
    import flashattn_ext

    return flashattn_ext.enable(device.type)


# ------------------------------------------------------------------------------------------------
# Host time


def host_call(problem: Problem, x: Inputs) -> Callable[[], object]:
    options = {"is_causal": problem.mask == "causal", "enable_gqa": True}
    if problem.mask == "bool":
        options["attn_mask"] = x.mask
    tensors = [x.query, x.key, x.value]
    if problem.name == "training":
        tensors = [tensor.detach().requires_grad_() for tensor in tensors]
    return functools.partial(F.scaled_dot_product_attention, *tensors, **options)


def host_results(problem: Problem, device: torch.device, settings: harness.Settings) -> dict:
    """Microseconds of a call; of one that trains, of its forward."""
    call = host_call(problem, input_sets(problem, device)[0])
    contexts = {"ours": functools.partial(enable, device)}
    timings = host_cost.time_batches(
        dict.fromkeys(LABELS, call), device, settings.samples, contexts=contexts
    )
    return {name: asdict(timing) for name, timing in timings.items()}


# ------------------------------------------------------------------------------------------------
# A model


def make_model(problem: Problem, device: torch.device) -> torch.nn.Module:
    """A Qwen3 with the heads of the problem, as wide and deep as that of 0.6 billion parameters
    where it has its 16 heads."""
    import transformers

    p, full = problem, problem.heads_q == 16
    config = transformers.Qwen3Config(
        vocab_size=151936 if full else 1000,
        hidden_size=64 * p.heads_q,
        intermediate_size=192 * p.heads_q,
        num_hidden_layers=28 if full else 2,
        num_attention_heads=p.heads_q,
        num_key_value_heads=p.heads_k,
        head_dim=p.head_dim,
        max_position_embeddings=max(40960, p.seqlen_q),
        tie_word_embeddings=True,
    )
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=p.dtype)
    return model.eval()


def model_results(problem: Problem, device: torch.device, settings: harness.Settings) -> dict:
    """Microseconds of a prompt, with the keys kept for decoding."""
    model = make_model(problem, device)
    vocabulary = model.config.vocab_size
    tokens = torch.randint(vocabulary, (problem.batch, problem.seqlen_q), device=device)

    @torch.inference_mode()
    def run(_: int = 0) -> torch.Tensor:
        return model(tokens, logits_to_keep=1).logits

    stock = run().double()
    contexts = {"ours": functools.partial(enable, device), "sdpa": nullcontext}

    def error_share() -> float:
        ours = run().double()
        difference = (ours - stock).square().sum() / (ours.square().sum() + stock.square().sum())
        return (difference / NORMALISED_DIFFERENCE).item()

    results = {name: harness.checked(contexts[name], error_share, device) for name in LABELS}
    calls = {
        name: Call(contexts[name], run)
        for name, result in results.items()
        if not result.keys() & {"error", "wrong"}
    }
    timings, failures = harness.measure(calls, device, settings)
    for name, timing in timings.items():
        results[name] |= asdict(timing)
    for name, reason in failures.items():
        results[name] = {"error": reason}
    return results


# ------------------------------------------------------------------------------------------------
# Rows, bars and the command line


def run_problem(problem: Problem, device: torch.device, settings: harness.Settings) -> dict:
    measure = host_results if problem.suite == HOST else model_results
    mode = host_cost.MODE if problem.suite == HOST else harness.eager_mode(device)
    fields = {"mode": mode, "unit": "us", "results": measure(problem, device, settings)}
    return harness.problem_fields(problem) | fields


def ratio(row: dict) -> float | None:
    """Time with enable() over that without."""
    ours, stock = (row["results"][name].get("median_us") for name in ("ours", "sdpa"))
    return ours / stock if ours and stock else None


def bars(result: dict) -> list[Bar]:
    """What is required on an H200, and what was measured."""
    ratios = {(row["suite"], row["name"], row["dtype"]): ratio(row) for row in result["rows"]}
    plain = [ratios.get((HOST, "plain", dtype)) for dtype in ("float16", "bfloat16")]
    model = ratios.get((MODEL, "qwen3-0.6b", "bfloat16"))
    return [
        Bar(
            "host time of a plain call, enabled/stock, highest",
            None if None in plain else max(plain),
            1.0,
            at_most=True,
        ),
        Bar("qwen3-0.6b, prompt of 16384: speed, enabled/stock", model and 1 / model, 1.08),
    ]


def describe(row: dict, result: dict) -> str:
    """One line for the terminal."""
    parts = [f"{row['label']:50}"]
    for name, label in LABELS.items():
        outcome = row["results"][name]
        us = outcome.get("median_us")
        text = "WRONG" if "wrong" in outcome else "-" if us is None else f"{us:.1f} us"
        parts.append(f"{label} {text}")
    found = ratio(row)
    return "  ".join(parts) + (f"  enabled/stock {found:.3f}" if found else "")


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = command.make_parser(__doc__, "override.json")
    command.add_problem_arguments(parser)
    parser.add_argument("--bars", action="store_true", help="print the bars for an H200")
    options = parser.parse_args(arguments)
    problems = gpu_problems() if options.device.type == "cuda" else cpu_problems()
    command.choose(parser, options, problems, harness.Settings(sample_ms=50.0, samples=20))
    return options


def main(arguments: list[str] | None = None) -> int:
    options, start = parse_arguments(arguments), time.perf_counter()
    result = command.measure(
        options,
        {"benchmark": "override", "labels": LABELS},
        lambda problem, device: run_problem(problem, device, options.settings),
        describe,
    )
    failures = command.report_failures(
        result, options, start, lambda row, name: result["labels"][name]
    )
    missed = options.bars and not print_bars(bars(result))
    return 1 if failures or missed else 0


if __name__ == "__main__":
    sys.exit(main())
