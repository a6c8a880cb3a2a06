"""The command line and the main loop that the benchmarks of speed share."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path

import harness
import torch
from workload import Problem


def make_parser(description: str, out: str) -> argparse.ArgumentParser:
    """With the options of every benchmark: where to run, how long, what to write."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default_device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=torch.device, default=default_device)
    parser.add_argument("--quick", action="store_true", help="few, short samples; noisy")
    parser.add_argument("--out", type=Path, default=out, help="result file (default: %(default)s)")
    parser.add_argument("--commit", help="commit to note in the result, outside a git checkout")
    return parser


def add_problem_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--match", default="", help="only problems whose label contains this")
    parser.add_argument("--samples", type=int, help="samples per candidate and problem, at least 2")


def names(
    parser: argparse.ArgumentParser, option: str, text: str | None, known: Iterable[str]
) -> list[str]:
    """What a comma-separated option names; all that is known where it is not given."""
    known = list(known)
    found = text.split(",") if text else known
    for name in found:
        if name not in known:
            parser.error(f"{option}: must be of {', '.join(known)}, got {name}")
    return found


def choose(
    parser: argparse.ArgumentParser,
    options: argparse.Namespace,
    problems: Iterable[Problem],
    settings: harness.Settings,
) -> None:
    """Sets options.problems to those that --match leaves, and options.settings."""
    options.problems = [p for p in problems if options.match in p.label()]
    if not options.problems:
        parser.error(f"--match: must be part of a problem's label, got {options.match}")
    options.settings = harness.QUICK if options.quick else settings
    if options.samples is not None:
        if options.samples < 2:
            parser.error(f"--samples: must be at least 2, got {options.samples}")
        options.settings = replace(options.settings, samples=options.samples)


def measure(
    options: argparse.Namespace,
    fields: dict,
    run_problem: Callable[[Problem, torch.device], dict],
    describe: Callable[[dict, dict], str],
    with_package: bool = True,
) -> dict:
    """Runs options.problems, with a line and a new result file for each, between two measurements
    of the ceilings. fields: `benchmark`, `labels` and what else heads the result. with_package:
    ours takes part."""
    device, settings = options.device, options.settings
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    environment = harness.environment(device)
    if options.commit:
        environment |= {"commit": options.commit, "dirty": None}
    if with_package:
        import flashattn_ext

        environment["flashattn_ext"] = flashattn_ext.build_info()
    environment["gpu_before"] = harness.gpu_state(device)
    environment["gpu_loaded"] = harness.settle(device)
    dtypes = dict.fromkeys(problem.dtype for problem in options.problems)
    result = {
        "schema": harness.SCHEMA,
        **fields,
        "environment": environment,
        "settings": asdict(settings),
        "ceilings": harness.ceilings(dtypes, device, settings),
        "ceilings_after": {},
        "rows": [],
    }
    progress = harness.Progress(len(options.problems))
    for problem in options.problems:
        row = run_problem(problem, device)
        result["rows"].append(row)
        harness.write_result(options.out, result)
        progress.advance(describe(row, result))
    progress.close()
    result["ceilings_after"] = harness.ceilings(dtypes, device, settings)
    environment["gpu_after"] = harness.settle(device, least_seconds=0.2)
    harness.write_result(options.out, result)
    return result


def report_failures(
    result: dict,
    options: argparse.Namespace,
    start: float,
    label: Callable[[dict, str], str] = lambda row, name: name,
) -> int:
    """Prints results that are wrong, and problems that ours refused. Returns how many there are.
    label: of a row's result, by its name."""
    failures = [
        f"{row['label']}: {label(row, name)}: {reason}"
        for row in result["rows"]
        for name, r in row["results"].items()
        if (reason := r.get("wrong") or (name.startswith("ours") and r.get("error")))
    ]
    count, seconds = len(result["rows"]), time.perf_counter() - start
    print(f"{count} problems, {len(failures)} failures, {seconds:.0f} s -> {options.out}")
    for line in failures:
        print(f"FAILED {line}", file=sys.stderr)
    return len(failures)
