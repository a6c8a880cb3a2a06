"""How often the dropped row maximum of the Hopper kernel is made up for, and what that costs.

    python benchmarks/bench_redo.py --out benchmarks/results/redo_h200.json
    python benchmarks/bench_redo.py --device cpu --only count,model --out redo.json

Parts: `count` models the kernel on made scores (redo_count.py), `model` on those of a trained model
(trained_scores.py; left out, with a message, where its packages are not installed), and `time` runs
our operator on the made scores (on CUDA only). Exit code 1 if a result is wrong.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict

import bench_prefill
import command
import harness
import report
import torch
import trained_scores
from redo_count import WALKS, Count, count_redos, exponents
from torch import Tensor
from workload import Inputs, Problem, Reference, input_sets, useful_flops

PARTS = ("count", "model", "time")
SCORES = ("normal", "x16", "sink")
SINK_NATS = 20.0
HEAD_DIMS = (64, 128)
MASKS = ("full", "causal")


def give_scores(kind: str, x: Inputs) -> None:
    """Changes random normal inputs in place. `x16` multiplies the scores; `sink` gives key 0 a
    score of 20 nats with every query, as the first token of a trained model has."""
    if kind == "x16":
        x.query.mul_(16)
    elif kind == "sink":
        x.query[..., 0] = 1
        x.key[:, :, 0] = 0
        x.key[:, :, 0, 0] = SINK_NATS * math.sqrt(x.query.shape[-1])


# ------------------------------------------------------------------------------------------------
# Counting


Counts = dict[tuple[str, int], Count]  # by walk and keys in a block


def count_heads(
    query: Tensor, key: Tensor, scale: float, causal: bool, options: argparse.Namespace
) -> Counts:
    """`query` (H, S, D), `key` (Hk, S, D)."""
    counts = {case: Count() for case in itertools.product(options.walk, options.block_n)}
    group = query.shape[0] // key.shape[0]
    for head in range(query.shape[0]):
        scores = exponents(query[head], key[head // group], scale, causal)
        for (walk, block_n), count in counts.items():
            count.add(count_redos(scores, block_n, causal, walk))
    return counts


def count_rows(label: str, counts: Counts) -> Iterator[dict]:
    """A row for every walk."""
    for walk in dict.fromkeys(walk for walk, _ in counts):
        results = {str(n): asdict(count) for (w, n), count in counts.items() if w == walk}
        row = {"part": "count", "label": f"{label}, {walk}", "walk": walk}
        yield row | {"results": results}


def made_rows(options: argparse.Namespace) -> Iterator[dict]:
    heads, seqlen = options.heads, options.seqlen
    for head_dim, mask, scores in itertools.product(HEAD_DIMS, MASKS, SCORES):
        problem = Problem("redo", "redo", 1, heads, heads, seqlen, seqlen, head_dim, mask)
        x = input_sets(problem, options.device)[0]
        give_scores(scores, x)
        scale, causal = head_dim**-0.5, mask == "causal"
        counts = count_heads(x.query[0], x.key[0], scale, causal, options)
        yield from count_rows(f"{scores} H{heads} S{seqlen} D{head_dim} {mask}", counts)


def model_rows(options: argparse.Namespace) -> Iterator[dict]:
    model = trained_scores.TrainedModel(options.device)
    shape = f"H{model.heads} S{options.seqlen} D{model.head_dim} causal"
    for text in trained_scores.TEXTS:
        layers: list[Counts] = []

        def keep(query, key, scale, layers=layers):
            # As the kernel would get them.
            query, key = query.bfloat16(), key.bfloat16()
            layers.append(count_heads(query, key, scale, True, options))

        loss = model.read(text, options.seqlen, keep)
        total = {case: Count() for case in layers[0]}
        for case, layer in itertools.product(total, layers):
            total[case].add(layer[case])
        for row in count_rows(f"{trained_scores.NAME} {text} {shape}", total):
            for block_n, result in row["results"].items():
                result["redone_by_layer"] = [
                    layer[row["walk"], int(block_n)].warp_redone for layer in layers
                ]
            yield row | {"loss_nats": round(loss, 4)}


# ------------------------------------------------------------------------------------------------
# Timing


def time_problems() -> list[Problem]:
    return [
        Problem("redo", "ours", 4, 16, 16, 4096, 4096, head_dim, mask)
        for head_dim in HEAD_DIMS
        for mask in MASKS
    ]


def time_row(problem: Problem, device: torch.device, settings: harness.Settings) -> dict:
    """Our operator on each kind of scores, interleaved."""
    launch = bench_prefill.bind_ours(problem)
    results: dict[str, dict] = {}
    calls = {}
    for scores in SCORES:
        sets = input_sets(problem, device)
        for x in sets:
            give_scores(scores, x)
        share = Reference.of(problem, sets[0]).error_share(launch(sets[0]))
        results[scores] = {"error_share": round(share, 4)}
        if not share <= 1:
            results[scores]["wrong"] = f"error {share:.3g} times the tolerance"
        calls[scores] = harness.Call(nullcontext, lambda i, sets=sets: launch(sets[i]), len(sets))
    timings, failures = harness.measure(calls, device, settings)
    if failures:
        raise RuntimeError(f"{problem.label()}: {failures}")
    for scores, timing in timings.items():
        results[scores] |= asdict(timing)
        results[scores]["ratio_to_normal"] = round(
            timing.median_us / timings["normal"].median_us, 4
        )
    kernel = bench_prefill.ours_kernel(problem, sets[0])
    return harness.problem_fields(problem) | {
        "part": "time",
        "flops": useful_flops(problem),
        **({"kernel": kernel} if kernel else {}),
        "results": results,
    }


# ------------------------------------------------------------------------------------------------
# Command line


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = command.make_parser(__doc__, "redo.json")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, comma-separated")
    parser.add_argument(
        "--block-n", default="64,80,128", help="keys in a block (default: %(default)s)"
    )
    parser.add_argument(
        "--walk", default=",".join(WALKS), help="over the key blocks (default: %(default)s)"
    )
    parser.add_argument(
        "--seqlen", type=int, default=4096, help="of the counts (default: %(default)s)"
    )
    parser.add_argument(
        "--heads", type=int, default=4, help="of the made scores (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    options.parts = command.names(parser, "--only", options.only, PARTS)
    options.walk = command.names(parser, "--walk", options.walk, WALKS)
    options.block_n = [int(text) for text in options.block_n.split(",")]
    if options.device.type != "cuda" and "time" in options.parts:
        options.parts.remove("time")
        print("time left out: it needs --device cuda", file=sys.stderr)
    if "model" in options.parts and (reason := trained_scores.missing()):
        options.parts.remove("model")
        print(reason, file=sys.stderr)
    if not options.parts:
        parser.error(f"--only: nothing of {options.only} can run here")
    return options


def rows_of(options: argparse.Namespace) -> Iterator[dict]:
    settings = harness.QUICK if options.quick else harness.Settings()
    if "count" in options.parts:
        yield from made_rows(options)
    if "model" in options.parts:
        yield from model_rows(options)
    if "time" in options.parts:
        for problem in time_problems():
            yield time_row(problem, options.device, settings)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    torch.manual_seed(0)
    environment = harness.environment(options.device)
    if options.commit:
        environment |= {"commit": options.commit, "dirty": None}
    if "time" in options.parts:
        import flashattn_ext

        environment["flashattn_ext"] = flashattn_ext.build_info()
        environment["gpu_loaded"] = harness.settle(options.device)
    result = {
        "schema": harness.SCHEMA,
        "benchmark": "redo",
        "environment": environment,
        "rows": [],
    }
    wrong = []
    for row in rows_of(options):
        result["rows"].append(row)
        harness.write_result(options.out, result)
        print(row["label"], flush=True)
        wrong += [f"{row['label']} {name}" for name, r in row["results"].items() if "wrong" in r]
    print(report.redo_block(result), f"-> {options.out}", sep="\n\n")
    for label in wrong:
        print(f"FAILED {label}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
