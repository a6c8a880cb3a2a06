"""Compares two result files, before and after a change.

    python benchmarks/compare.py before.json after.json [--candidate ours] [--relative-to fa2]

Prints the time of one candidate in both and their ratio, for every problem in both files. Exit code
1 if any became more than 3 % slower beyond the noise, which is the larger inter-quartile range of
the two. With --relative-to the times are taken relative to those of another candidate in the same
run, which takes out the clocks of two different runs or GPUs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import harness
import rates
import report

LIMIT = 0.03


def key(row: dict) -> tuple:
    """What makes two rows the same measurement."""
    return row["label"], row["mode"]


def reading(row: dict, candidate: str, relative_to: str | None) -> tuple[float, float] | None:
    """Median in microseconds, or relative to another candidate; and the noise as a share of it."""
    value, noise = 1.0, 0.0
    for name, power in ((candidate, 1), (relative_to, -1)):
        if name is None:
            continue
        times = row["results"].get(name, {})
        if "median_us" not in times:
            return None
        value *= times["median_us"] ** power
        noise += (times["q3_us"] - times["q1_us"]) / times["median_us"]
    return value, noise


def compare(
    before: dict, after: dict, candidate: str, relative_to: str | None
) -> tuple[str, list[str]]:
    """The table, and the labels of the problems that became slower."""
    old_rows = {key(row): row for row in before["rows"]}
    lines, slower, ratios = [], [], []
    for row in after["rows"]:
        old_row = old_rows.get(key(row))
        old = reading(old_row, candidate, relative_to) if old_row else None
        new = reading(row, candidate, relative_to)
        if old is None or new is None:
            continue
        ratio, noise = new[0] / old[0], max(old[1], new[1])
        ratios.append(ratio)
        verdict = ""
        if ratio > 1 + LIMIT + noise:
            verdict = "SLOWER"
            slower.append(row["label"])
        elif ratio < 1 - LIMIT - noise:
            verdict = "faster"
        values = [report.number(value, 3 if relative_to else 1) for value in (old[0], new[0])]
        lines.append([row["label"], *values, f"{ratio:.3f}", f"{100 * noise:.1f} %", verdict])
    if not lines:
        raise RuntimeError(f"compare: the files must share a problem timed for {candidate}")
    unit = f"/ {relative_to}" if relative_to else "us"
    lines.append(["geometric mean", "", "", f"{rates.geomean(ratios):.3f}", "", ""])
    heads = ["problem", f"before {unit}", f"after {unit}", "ratio", "noise", ""]
    return report.table(heads, lines), slower


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--candidate", default="ours")
    parser.add_argument("--relative-to", help="another candidate in both files")
    options = parser.parse_args(arguments)
    before, after = harness.read_result(options.before), harness.read_result(options.after)
    text, slower = compare(before, after, options.candidate, options.relative_to)
    print(report.stamp(before), report.stamp(after), text, sep="\n")
    print(f"{len(slower)} slower by more than {100 * LIMIT:.0f} % beyond noise")
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
