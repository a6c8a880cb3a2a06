"""Turns a result file into tables and a plot.

    python benchmarks/report.py show benchmarks/results/h200.json [--plot h200.png]
    python benchmarks/report.py bars benchmarks/results/h200.json
    python benchmarks/report.py update [FILE.md ...]
    python benchmarks/report.py check  [FILE.md ...]

`update` rewrites, and `check` compares (exit code 1 if they differ), every generated block of the
Markdown files, by default README.md and those of benchmarks/results. A block stands between

    <!-- benchmark summary h200.json -->
    <!-- end benchmark -->

where the third word is `summary` or `full`, for a result of bench_prefill.py, bench_backward.py or
bench_decode.py, `full` for one of bench_varlen.py, bench_override.py or bench_static_cache.py, or
`redo` for one of bench_redo.py, and the fourth a file in benchmarks/results.

`bars` prints one line per requirement on the speed on an H200, with the value measured; exit code 1
if any is missed.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable
from pathlib import Path

import bars
import bench_override
import bench_static_cache
import bench_varlen
import decode_rates
import dtype_speed
import harness
import host_cost
import peak_memory
from rates import FA3, FA3_LABEL, FORWARD, geomean, launch_rows, speeds, speedup

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
DEFAULT_FILES = [HERE.parent / "README.md", RESULTS / "README.md", RESULTS / "redo.md"]
BLOCK = re.compile(
    r"(?P<head><!-- benchmark (?P<kind>summary|full|redo) (?P<file>[\w.-]+) -->\n)"
    r"(?:(?!<!-- benchmark ).)*?(?P<tail><!-- end benchmark -->)",
    re.DOTALL,
)


# ------------------------------------------------------------------------------------------------
# Rows and labels


def host_rows(result: dict) -> list[dict]:
    return [row for row in result["rows"] if row["mode"] == host_cost.MODE]


def dtype_rows(result: dict) -> list[dict]:
    return [row for row in result["rows"] if row["mode"] == dtype_speed.MODE]


def row_labels(result: dict, row: dict) -> dict[str, str]:
    """The candidates of a row by name."""
    own = {host_cost.MODE: "host_labels", dtype_speed.MODE: "dtype_labels"}
    return result[own.get(row["mode"], "labels")]


def labels(result: dict) -> dict[str, str]:
    """Candidates by name, FA3 last if any row has it."""
    device = result["environment"]["device"]
    known = any(FA3 in speeds(row, device) for row in launch_rows(result))
    return result["labels"] | ({FA3: FA3_LABEL} if known else {})


# ------------------------------------------------------------------------------------------------
# Tables


def table(heads: list[str], lines: Iterable[list[str]]) -> str:
    """A Markdown table, padded so that it reads in a terminal too; all but the first column are
    numbers."""
    cells = [heads, *lines]
    widths = [max(len(line[i]) for line in cells) for i in range(len(heads))]

    def render(line: list[str]) -> str:
        rest = [cell.rjust(w) for cell, w in zip(line[1:], widths[1:], strict=True)]
        return "| " + " | ".join([line[0].ljust(widths[0]), *rest]) + " |"

    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join([render(cells[0]), render(rule), *map(render, cells[1:])])


def number(value: float | None, digits: int = 0) -> str:
    """Fixed digits, three significant ones below 10; a dash for None."""
    if value is None:
        return "-"
    if digits == 0 and value < 10:
        return f"{value:.3g}"
    return f"{value:.{digits}f}"


def grid_table(result: dict, suite: str = "grid") -> str:
    """Geometric means over the sequence lengths of the grid, by head_dim and mask."""
    device = result["environment"]["device"]
    grid = [row for row in result["rows"] if row["suite"] == suite]
    ran = {name for row in grid for name in speeds(row, device)}
    names = {name: label for name, label in labels(result).items() if name in ran}
    groups: dict[str, list[dict]] = {}
    for row in grid:
        groups.setdefault(f"D{row['head_dim']} {row['mask']}", []).append(row)
    groups["all"] = grid
    lines = []
    for group, rows in groups.items():
        rates = [speeds(row, device) for row in rows]
        line = [f"{group} ({len(rows)})"]
        for name in names:
            known = [r[name] for r in rates if name in r]
            line.append(number(geomean(known) if len(known) == len(rows) else None))
        for other in ("fa2", "best"):
            ratios = [ratio for r in rates if (ratio := speedup(r, other)) is not None]
            complete = len(ratios) == len(rows)
            line.append(number(geomean(ratios) if complete else None, 2))
            line.append(number(min(ratios) if complete else None, 2))
        lines.append(line)
    heads = [f"{suite} (cells)", *names.values(), "ours/FA2", "min", "ours/best", "min"]
    return table(heads, lines)


def row_table(result: dict, rows: Iterable[dict]) -> str:
    """TFLOPS of every candidate, one problem a line."""
    device, names = result["environment"]["device"], labels(result)
    lines = []
    for row in rows:
        rates = speeds(row, device)
        line = [row["label"], *(number(rates.get(name)) for name in names)]
        lines.append(line + [number(speedup(rates, other), 2) for other in ("fa2", "best")])
    return table(["problem", *names.values(), "ours/FA2", "ours/best"], lines)


def noise_table(result: dict) -> str:
    """Microseconds of our launches with their spread, the eager time of small problems (host cost
    included), the share of the roofline, and the kernel where the result names it."""
    lines = []
    rows = launch_rows(result)
    kernels = any("kernel" in row for row in rows)
    for row in rows:
        ours = row["results"].get("ours", {})
        if "median_us" not in ours:
            continue
        share = harness.roofline_share(row, "ours", result["ceilings"])
        spread = (ours["q3_us"] - ours["q1_us"]) / ours["median_us"]
        lines.append(
            [
                row["label"],
                row["mode"],
                number(ours["median_us"], 1),
                f"{100 * spread:.1f} %",
                number(ours.get("eager_us"), 1),
                "-" if share is None else f"{100 * share:.0f} %",
                number(ours["error_share"], 2),
                *([kernel_name(row)] if kernels else []),
            ]
        )
    heads = ["problem", "mode", "us", "IQR", "eager us", "roofline", "error / tolerance"]
    return table([*heads, "kernel"] if kernels else heads, lines)


def kernel_name(row: dict) -> str:
    """Name and tile of the kernel that ours took, without what follows the colon."""
    return row.get("kernel", "-").partition(":")[0]


def host_table(result: dict) -> str:
    """Microseconds of host time for one eager call, and ours over plain SDPA's."""
    names = result["host_labels"]
    lines = []
    for row in host_rows(result):
        results = row["results"]
        times = [number(results[name].get("median_us"), 2) for name in names]
        share = results["ours"].get("ratio_to_sdpa")
        lines.append([row["label"], *times, number(share, 2)])
    return table(["host us of a call", *names.values(), "fa.forward/plain SDPA"], lines)


def dtype_table(result: dict) -> str:
    """Microseconds in fp16 and bf16, and the speed in fp16 relative to bf16."""
    names = result["dtype_labels"]
    lines = []
    for row in dtype_rows(result):
        times = [number(row["results"][name].get("median_us"), 1) for name in names]
        shares = [number(row[name], 3) for name in ("ratio", "cudnn_ratio")]
        lines.append([row["label"], *times, *shares])
    heads = ["us of a launch", *names.values(), "ours fp16/bf16", "cuDNN fp16/bf16"]
    return table(heads, lines)


def redo_count_table(rows: Iterable[dict]) -> str:
    """Share of the key blocks exponentiated at once that are redone, in percent: of a warp's, and,
    behind the stroke, of those in which some warp of its warpgroup does; by the scores and the
    number of keys in a block. A model has another line for its worst layer."""

    def percent(redone: int, blocks: int) -> str:
        return number(100 * redone / blocks, 3) if blocks else "-"

    rows = list(rows)
    sizes = list(dict.fromkeys(size for row in rows for size in row["results"]))
    lines = []
    for row in rows:
        results = [row["results"].get(size) for size in sizes]
        line = [
            f"{percent(r['warp_redone'], r['warp_blocks'])} / "
            f"{percent(r['warpgroup_redone'], r['warpgroup_blocks'])}"
            if r
            else "-"
            for r in results
        ]
        lines.append([row["label"], *line])
        layers = [r and r.get("redone_by_layer") for r in results]
        if any(layers):
            worst = [
                percent(max(of) * len(of), r["warp_blocks"]) if of else "-"
                for of, r in zip(layers, results, strict=True)
            ]
            lines.append([f"{row['label']}, worst layer", *worst])
    return table(["redone, % of warp / warpgroup", *(f"{size} keys" for size in sizes)], lines)


def redo_time_table(rows: Iterable[dict]) -> str:
    """Microseconds of the kernel by the scores, and their ratio to those on normal scores."""
    lines = []
    for row in rows:
        for scores, r in row["results"].items():
            spread = 100 * (r["q3_us"] - r["q1_us"]) / r["median_us"]
            ratio = number(r["ratio_to_normal"], 3)
            us = number(r["median_us"], 1)
            lines.append([f"{row['label']} {scores}", us, f"{spread:.1f} %", ratio])
            lines[-1].append(kernel_name(row))
    return table(["problem", "us", "IQR", "/ normal", "kernel"], lines)


def stamp(result: dict) -> str:
    """One line of what the run ran on."""
    env = result["environment"]
    commit = (env["commit"] or "unknown")[:10] + (" + changes" if env["dirty"] else "")
    parts = [env["device"], f"torch {env['torch']}"]
    if env.get("cudnn"):
        parts.append(f"cuDNN {env['cudnn']}")
    loaded = env.get("gpu_loaded") or {}
    if loaded:
        parts.append(f"driver {loaded['driver']}")
        clock = f"{loaded['sm_mhz']} MHz and {loaded['power_w']} W"
        parts.append(f"{clock} of {loaded['power_limit_w']} W under a matrix product")
    return ", ".join([*parts, f"commit {commit}", env["date"]])


def summary_block(result: dict) -> str:
    """The block for README: the grid in geometric means, every other problem in one line."""
    rows = launch_rows(result)
    others = [row for row in rows if row["suite"] != "grid"]
    parts = [f"TFLOPS of useful work (visible pairs only). {stamp(result)}."]
    if len(others) < len(rows):
        parts.append(grid_table(result))
    if others:
        parts.append(row_table(result, others))
    if host_rows(result):
        parts.append(host_table(result))
    return "\n\n".join(parts)


def heading(result: dict) -> list[str]:
    """What ran, and the ceilings of the run."""
    rates = ", ".join(f"{name} {value}" for name, value in result["ceilings"].items())
    after = ", ".join(f"{name} {value}" for name, value in result["ceilings_after"].items())
    return [f"{stamp(result)}.", f"Ceilings in the same run: {rates}; at its end: {after}."]


def full_block(result: dict) -> str:
    """Every problem, ceilings, noise, host cost and the two dtypes beside each other."""
    parts = heading(result)
    if launch_rows(result):
        parts += [row_table(result, launch_rows(result)), noise_table(result)]
    if host_rows(result):
        parts.append(host_table(result))
    if dtype_rows(result):
        parts.append(dtype_table(result))
    return "\n\n".join(parts)


def suite_rows(result: dict, *suites: str) -> list[dict]:
    return [row for row in result["rows"] if row["suite"] in suites]


def deterministic_table(rows: Iterable[dict]) -> str:
    """Microseconds of our backward with and without a fixed order of its additions."""
    lines = []
    for row in rows:
        results = row["results"].values()
        times = [number(r.get("median_us"), 1) for r in results]
        lines.append([row["label"], *times, number(row.get("slowdown"), 2)])
    return table(["us of a backward", "ours", "deterministic", "ratio"], lines)


def mebibytes(count: int | None) -> str:
    return number(None if count is None else count / 2**20, 1)


def memory_table(result: dict) -> str:
    """Peak of a forward and a backward above their inputs, and ours over the least of others."""
    lines = []
    for row in suite_rows(result, peak_memory.SUITE):
        peaks = {name: r.get("peak_bytes") for name, r in row["results"].items()}
        others = [peak for name, peak in peaks.items() if name != "ours" and peak]
        ours = peaks.get("ours")
        share = ours / min(others) if ours and others else None
        cells = [mebibytes(peaks.get(name)) for name in result["labels"]]
        lines.append([row["label"], *cells, number(share, 2)])
    return table(["peak MiB", *result["labels"].values(), "ours/least"], lines)


def backward_summary(result: dict) -> str:
    """The block for README: geometric means of the grid and of the portable kernel, the other
    problems in one line each, and memory."""
    parts = [f"Backward, TFLOPS of useful work (2.5 times that of the forward). {stamp(result)}."]
    parts += [grid_table(result, s) for s in ("grid", "portable") if suite_rows(result, s)]
    if rows := suite_rows(result, "dtype", "stack"):
        parts.append(row_table(result, rows))
    slowdowns = [r["slowdown"] for r in suite_rows(result, "deterministic") if "slowdown" in r]
    if slowdowns:
        parts.append(
            f"Deterministic, ours takes {geomean(slowdowns):.2f} times as long (geometric mean of "
            f"{len(slowdowns)} cells; at most {max(slowdowns):.2f})."
        )
    if suite_rows(result, peak_memory.SUITE):
        parts.append(memory_table(result))
    return "\n\n".join(parts)


def backward_full(result: dict) -> str:
    """Every problem, ceilings and noise."""
    rows = suite_rows(result, "grid", "dtype", "portable", "stack")
    parts = heading(result)
    if rows:
        parts.append(row_table(result, rows))
    if launch_rows(result):
        parts.append(noise_table(result))
    if rows := suite_rows(result, "deterministic"):
        parts.append(deterministic_table(rows))
    if suite_rows(result, peak_memory.SUITE):
        parts.append(memory_table(result))
    return "\n\n".join(parts)


def decode_table(result: dict) -> str:
    """GB/s of K and V of every candidate, one problem a line."""
    device = result["environment"]["device"]
    rates = {row["label"]: decode_rates.speeds(row, device) for row in result["rows"]}
    known = any(FA3 in gbs for gbs in rates.values())
    names = result["labels"] | ({FA3: FA3_LABEL} if known else {})
    lines = []
    for label, gbs in rates.items():
        peers = [gbs[name] for name in decode_rates.BEST_OF if name in gbs]
        shares = [
            gbs["ours"] / other if other and "ours" in gbs else None
            for other in (max(peers, default=None), gbs.get("sdpa"))
        ]
        cells = [number(gbs.get(name)) for name in names]
        lines.append([label, *cells, *(number(share, 2) for share in shares)])
    heads = ["GB/s of K and V", *names.values(), "ours/best", "ours/plain SDPA"]
    return table(heads, lines)


def decode_times(result: dict) -> str:
    """Microseconds of our calls with the spread of the first, and the kernel of fa.forward."""
    lines, labels = [], result["labels"]
    names = [name for name in labels if name.startswith("ours")]
    for row in result["rows"]:
        results = [row["results"].get(name, {}) for name in names]
        ours = results[0]
        if "median_us" not in ours:
            continue
        spread = 100 * (ours["q3_us"] - ours["q1_us"]) / ours["median_us"]
        times = [number(r.get("median_us"), 1) for r in results]
        eager = number(ours.get("eager_us"), 1)
        lines.append([row["label"], *times, f"{spread:.1f} %", eager, kernel_name(row)])
    heads = [labels[name] for name in names]
    return table(["us", *heads, "IQR", "eager us", "kernel of fa.forward"], lines)


def decode_summary(result: dict) -> str:
    """The block for README."""
    return f"Decoding, from CUDA graphs. {stamp(result)}.\n\n{decode_table(result)}"


def decode_full(result: dict) -> str:
    """Times, kernels and ceilings beside it."""
    return "\n\n".join([*heading(result), decode_table(result), decode_times(result)])


def times_block(result: dict) -> str:
    """Microseconds of two candidates, ours first, and the share of the second."""
    names = result["labels"]
    lines = []
    for row in result["rows"]:
        times = [row["results"][name].get("median_us") for name in names]
        share = None if None in times else times[0] / times[1]
        lines.append([row["label"], *(number(us, 1) for us in times), number(share, 3)])
    ours, other = names.values()
    return f"{stamp(result)}.\n\n{table(['us', ours, other, f'{ours}/{other}'], lines)}"


def redo_block(result: dict) -> str:
    """How often the dropped row maximum is made up for, and what that costs."""
    parts = [f"{stamp(result)}."]
    for part, render in (("count", redo_count_table), ("time", redo_time_table)):
        rows = [row for row in result["rows"] if row["part"] == part]
        if rows:
            parts.append(render(rows))
    return "\n\n".join(parts)


# By the benchmark that made a result, in the order of `show`.
BLOCKS = {
    "prefill": {"summary": summary_block, "full": full_block},
    "backward": {"summary": backward_summary, "full": backward_full},
    "decode": {"summary": decode_summary, "full": decode_full},
    "redo": {"redo": redo_block},
    "varlen": {"full": full_block},
    "override": {"full": times_block},
    "static_cache": {"full": times_block},
}
BARS = {
    "prefill": bars.forward_bars,
    "backward": bars.backward_bars,
    "decode": decode_rates.bars,
    "varlen": bench_varlen.bars,
    "override": bench_override.bars,
    "static_cache": bench_static_cache.bars,
}


# ------------------------------------------------------------------------------------------------
# Plot


def plot(result: dict, path: Path) -> None:
    """TFLOPS over sequence length, a panel for every head_dim and mask of the grid."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    device, names = result["environment"]["device"], labels(result)
    grid = [row for row in result["rows"] if row["suite"] == "grid"]
    if not grid:
        raise RuntimeError("plot: the result must hold rows of the grid, got none")
    head_dims = sorted({row["head_dim"] for row in grid})
    masks = sorted({row["mask"] for row in grid}, reverse=True)  # full above causal
    # Okabe-Ito: told apart by colour-blind readers. Ours is drawn over the others.
    styles = {
        "ours": {"color": "#D55E00", "marker": "o", "linewidth": 2.5, "zorder": 3},
        "fa2": {"color": "#0072B2", "marker": "s"},
        "cudnn": {"color": "#009E73", "marker": "^"},
        "sdpa": {"color": "#56B4E9", "marker": "v", "linestyle": ":"},
        "efficient": {"color": "#999999", "marker": "x"},
        FA3: {"color": "#CC79A7", "marker": "D", "linestyle": "--"},
    }
    figure, axes = plt.subplots(
        len(masks),
        len(head_dims),
        figsize=(4 * len(head_dims), 3.2 * len(masks) + 0.8),
        sharex=True,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    drawn, top = {}, 0.0
    for line, mask in zip(axes, masks, strict=True):
        for axis, head_dim in zip(line, head_dims, strict=True):
            rows = [r for r in grid if r["mask"] == mask and r["head_dim"] == head_dim]
            rows.sort(key=lambda row: row["seqlen_k"])
            for name, label in names.items():
                points = {r["seqlen_k"]: speeds(r, device).get(name) for r in rows}
                points = {length: rate for length, rate in points.items() if rate is not None}
                if points:
                    style = styles.get(name, {})
                    (drawn[label],) = axis.plot(*zip(*points.items(), strict=True), **style)
                    top = max(top, *points.values())
            lengths = [row["seqlen_k"] for row in rows]
            axis.set_xscale("log", base=2)
            axis.set_xticks(lengths, [f"{s // 1024}k" if s >= 1024 else str(s) for s in lengths])
            axis.grid(alpha=0.3)
            axis.set_title(f"head_dim {head_dim}, {mask}", fontsize=10)
        line[0].set_ylabel("TFLOPS")
    for axis in axes[-1]:
        axis.set_xlabel("sequence length")
    axes[0][0].set_ylim(0, 1.05 * top)  # of all panels: they share their axes
    figure.legend(
        drawn.values(), drawn, loc="outside lower center", ncols=len(drawn), frameon=False
    )
    dtype = {row["dtype"] for row in grid}
    direction = grid[0].get("direction", FORWARD)
    title = f"Attention {direction}, {', '.join(dtype)}, 16k tokens, {device}"
    figure.suptitle(title, fontsize=12)
    figure.savefig(path, dpi=110)
    plt.close(figure)


# ------------------------------------------------------------------------------------------------
# Generated blocks


def regenerate(text: str) -> str:
    """The text with every generated block as the result files make it."""

    def block(match: re.Match) -> str:
        path = RESULTS / match["file"]
        if not path.is_file():
            return f"{match['head']}Not measured yet.\n{match['tail']}"
        result = harness.read_result(path)
        render = BLOCKS[result["benchmark"]][match["kind"]]
        return f"{match['head']}{render(result)}\n{match['tail']}"

    return BLOCK.sub(block, text)


def stale_files(files: Iterable[Path]) -> list[Path]:
    """Those of the Markdown files whose blocks differ from what the result files make.
    RuntimeError for a file without a block."""
    stale = []
    for path in files:
        text = path.read_text()
        if not BLOCK.search(text):
            raise RuntimeError(f"{path}: must hold a generated block, <!-- benchmark ... -->")
        if text != regenerate(text):
            stale.append(path)
    return stale


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser("show", help="print the tables of a result file")
    show.add_argument("result", type=Path)
    show.add_argument("--plot", type=Path, help="write a PNG")
    checked = commands.add_parser("bars", help="compare a result with what is required of it")
    checked.add_argument("result", type=Path)
    for name in ("update", "check"):
        command = commands.add_parser(name, help=f"{name} the generated blocks")
        command.add_argument("files", type=Path, nargs="*", default=DEFAULT_FILES)
    options = parser.parse_args(arguments)

    if options.command == "show":
        result = harness.read_result(options.result)
        print(*(render(result) for render in BLOCKS[result["benchmark"]].values()), sep="\n\n")
        if options.plot:
            plot(result, options.plot)
        return 0
    if options.command == "bars":
        result = harness.read_result(options.result)
        if result["benchmark"] not in BARS:
            raise SystemExit(f"result: nothing is required of one of {result['benchmark']}")
        return 0 if bars.print_bars(BARS[result["benchmark"]](result)) else 1
    stale = stale_files(options.files)
    for path in stale:
        if options.command == "update":
            path.write_text(regenerate(path.read_text()))
            print(f"{path}: updated")
        else:
            print(f"{path}: differs; run `python benchmarks/report.py update`")
    return 1 if stale and options.command == "check" else 0


if __name__ == "__main__":
    sys.exit(main())
