"""The two logs, step by step: builds every rung, checks it, measures it, and shows what it brought
here beside what the log claims. Our own kernels and plain SDPA stand as the last rungs.

    python benchmarks/ladder.py --out benchmarks/results/ladder_h200.json
    python benchmarks/ladder.py --log 000 --rungs V8,V10
    python benchmarks/ladder.py --show benchmarks/results/ladder_h200.json

Writes a JSON result and, beside it, a PNG. Where ncu is present, the warps, the caches and the
instructions of every rung are measured too. benchmarks/ladder has the kernels and tells the story.
Exit code 1 if a rung is wrong or fails.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict
from pathlib import Path

import command
import harness
import ladder_kernels
import ladder_profile
import ladder_report
import torch
from harness import Call, nullcontext
from ladder_rungs import HOPPER, LOGS, PORTABLE, SDPA, Log
from workload import Inputs, input_sets, least_bytes, useful_flops

sys.path.append(str(harness.ROOT / "tests"))

import reference

NCU_SECONDS = 100  # for a log


def inputs_of(log: Log, device: torch.device) -> list[Inputs]:
    """Sets of contiguous tensors, as the logs have them."""
    return [
        Inputs(x.query.contiguous(), x.key.contiguous(), x.value.contiguous(), None)
        for x in input_sets(log.problem, device)
    ]


class Check:
    """The errors of results, as a share of what the test-suite accepts."""

    def __init__(self, log: Log, x: Inputs):
        causal = log.problem.mask == "causal"
        self.exact = reference.attention_ref(x.query, x.key, x.value, is_causal=causal)
        low = reference.attention_low(x.query, x.key, x.value, is_causal=causal)
        self.bound = reference.error_bound(self.exact, low, x.query.dtype)

    def error_share(self, out: torch.Tensor) -> float:
        return ((out.double() - self.exact.out).abs() / self.bound).max().item()


def run_log(
    log: Log, rungs: list[str], library, options: argparse.Namespace, progress: harness.Progress
) -> dict:
    """The row of the result file: the problem, its work, and for every rung its error, its time,
    what its kernel takes, and what ncu says of it."""
    row = measure_log(log, rungs, library, options, progress)
    if options.no_ncu:
        return row
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # the other process needs some
    timed = [rung for rung in rungs if "median_us" in row["results"][rung]]
    try:
        for rung, fields in ladder_profile.profile(log, timed, NCU_SECONDS).items():
            row["results"][rung]["ncu"] = fields
    except RuntimeError as error:
        row["ncu_error"] = harness.first_line(error)
    progress.advance(f"log {log.name}  profiled  {row.get('ncu_error', '')}")
    return row


def measure_log(
    log: Log, rungs: list[str], library, options: argparse.Namespace, progress: harness.Progress
) -> dict:
    """The row without ncu."""
    device = options.device
    sets = inputs_of(log, device)
    check = Check(log, sets[0])
    results: dict[str, dict] = {}
    calls: dict[str, Call] = {}
    for rung in rungs:
        bound: list = []

        def error_share(rung=rung, bound=bound) -> float:
            bound += [ladder_kernels.bind(library, log, rung, x) for x in sets]
            return check.error_share(bound[0]())

        result = results[rung] = harness.checked(nullcontext, error_share, device)
        if not result.keys() & {"error", "wrong"}:
            calls[rung] = Call(nullcontext, lambda i, bound=bound: bound[i](), len(sets))
        if rung not in (PORTABLE, HOPPER, SDPA) and "error" not in result:
            result |= ladder_kernels.describe(library, log.name, rung)
        share = result.get("error_share", result.get("error"))
        progress.advance(f"log {log.name}  checked   {rung:20} {share}")
    flops, graph = useful_flops(log.problem), device.type == "cuda"
    harness.add_timings(results, calls, flops, device, options.settings, graph)
    for rung in rungs:
        us = results[rung].get("median_us")
        progress.advance(f"log {log.name}  measured  {rung:20} {us} us")
    return harness.problem_fields(log.problem) | {
        "log": log.name,
        "mode": "graph" if graph else harness.eager_mode(device),
        "input_sets": len(sets),
        "flops": flops,
        "bytes": least_bytes(log.problem),
        "results": results,
    }


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = command.make_parser(__doc__, "ladder.json")
    parser.add_argument("--log", choices=LOGS, help="one log (default: both)")
    parser.add_argument("--rungs", help="comma-separated names (default: all)")
    parser.add_argument("--no-ncu", action="store_true", help="times only")
    parser.add_argument("--show", type=Path, metavar="FILE", help="print and plot a result file")
    options = parser.parse_args(arguments)
    logs = [LOGS[options.log]] if options.log else list(LOGS.values())
    known = dict.fromkeys(rung.name for log in logs for rung in log.rungs)
    chosen = command.names(parser, "--rungs", options.rungs, known)
    options.rungs = {
        log: found for log in logs if (found := [r.name for r in log.rungs if r.name in chosen])
    }
    options.settings = harness.QUICK if options.quick else harness.Settings()
    if not options.show and not torch.cuda.is_available():
        parser.error("the ladder needs a GPU; --show FILE prints a result")
    return options


def measure(options: argparse.Namespace) -> dict:
    device = options.device = torch.device("cuda", options.device.index or 0)
    torch.cuda.set_device(device)
    torch.manual_seed(0)
    environment = harness.environment(device)
    if options.commit:
        environment |= {"commit": options.commit, "dirty": None}
    if any({PORTABLE, HOPPER} & set(rungs) for rungs in options.rungs.values()):
        try:
            import flashattn_ext
        except ImportError as error:
            raise SystemExit(f"--rungs: our rungs need the installed package: {error}") from error
        environment["flashattn_ext"] = flashattn_ext.build_info()
    count = sum(2 * len(rungs) + (not options.no_ncu) for rungs in options.rungs.values())
    progress = harness.Progress(1 + count)
    start = time.perf_counter()
    library = ladder_kernels.build()
    progress.advance(f"built in {time.perf_counter() - start:.0f} s")
    environment["gpu_loaded"] = harness.settle(device)
    result = {
        "schema": harness.SCHEMA,
        "benchmark": "ladder",
        "environment": environment,
        "settings": asdict(options.settings),
        "ceilings": harness.ceilings([torch.float16], device, options.settings),
        "rows": [],
    }
    for log, rungs in options.rungs.items():
        result["rows"].append(run_log(log, rungs, library, options, progress))
        harness.write_result(options.out, result)
    progress.close()
    return result


def failures(result: dict) -> list[str]:
    """What is wrong or did not run. Our Hopper kernel may refuse: it is for one kind of GPU."""
    return [
        f"log {row['log']}, {rung}: {reason}"
        for row in result["rows"]
        for rung, r in row["results"].items()
        if (reason := r.get("wrong") or (rung != HOPPER and r.get("error")))
    ]


def main(arguments: list[str] | None = None) -> int:
    options, start = parse_arguments(arguments), time.perf_counter()
    if options.show:
        options.out, result = options.show, harness.read_result(options.show)
    else:
        result = measure(options)
    print(*(ladder_report.terminal_table(row) for row in result["rows"]), sep="\n\n")
    ladder_report.plot(result, options.out.with_suffix(".png"))
    if options.show:
        return 0
    failed = failures(result)
    print(f"{len(failed)} failures, {time.perf_counter() - start:.0f} s -> {options.out}")
    print("".join(f"FAILED {line}\n" for line in failed), end="", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
