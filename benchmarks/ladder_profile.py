"""What Nsight Compute says of every rung: the tensor pipe, the warps, why they stall, the caches,
the instructions. Run as a script, under ncu, it launches rungs once each:

    ncu ... python benchmarks/ladder_profile.py 000 V5,V6
"""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from ladder_rungs import HOPPER, LOGS, PORTABLE, SDPA, Log

STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
STALLS = [
    *("barrier", "branch_resolving", "dispatch_stall", "drain", "gmma", "imc_miss"),
    *("lg_throttle", "long_scoreboard", "math_pipe_throttle", "membar", "mio_throttle", "misc"),
    *("no_instruction", "not_selected", "short_scoreboard", "sleeping", "tex_throttle", "wait"),
]
# By field of the result; of several, the first that the GPU has.
METRICS = {
    "us": ["gpu__time_duration.sum"],
    "tensor_percent": [
        "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
        "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_elapsed",
    ],
    "issue_percent": ["smsp__issue_active.avg.pct_of_peak_sustained_active"],
    "warps_per_scheduler": ["smsp__warps_active.avg.per_cycle_active"],
    "instructions": ["smsp__inst_executed.sum"],
    "ffma": ["smsp__sass_thread_inst_executed_op_ffma_pred_on.sum"],
    "fmul": ["smsp__sass_thread_inst_executed_op_fmul_pred_on.sum"],
    "fadd": ["smsp__sass_thread_inst_executed_op_fadd_pred_on.sum"],
    "shared_wavefronts": ["l1tex__data_pipe_lsu_wavefronts_mem_shared.sum"],
    "bank_conflicts": ["l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum"],
    "l2_hit_percent": ["lts__t_sector_hit_rate.pct"],
    "l2_sectors": ["lts__t_sectors.sum"],
    "dram_read_bytes": ["dram__bytes_read.sum"],
    "dram_write_bytes": ["dram__bytes_write.sum"],
    "registers": ["launch__registers_per_thread"],
    "dynamic_smem_bytes": ["launch__shared_mem_per_block_dynamic"],
    "static_smem_bytes": ["launch__shared_mem_per_block_static"],
    "threads": ["launch__block_size"],
    "ctas": ["launch__grid_size"],
    **{f"stalled_{name}": [STALL.format(name)] for name in STALLS},
}
# A ladder's kernels run in the order of their rungs, each rung one kernel.
LADDER_KERNEL = re.compile(r"column_warps_kernel|two_by_two_kernel|whole_rows_kernel")


def find_ncu() -> str | None:
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("ncu") or shutil.which("ncu", path=str(Path(home, "bin")))


def known_metrics(ncu: str) -> set[str]:
    """Names, without what follows the point, of the metrics of this machine's GPU."""
    done = subprocess.run([ncu, "--query-metrics"], capture_output=True, text=True, timeout=60)
    return set(re.findall(r"^(\w+__\w+)\s", done.stdout, re.MULTILINE))


def chosen_metrics(known: set[str]) -> dict[str, str]:
    """A metric for each field that has one here. launch__ ones are always there and never
    listed."""
    chosen = {}
    for field, names in METRICS.items():
        for name in names:
            if name.startswith("launch__") or name.partition(".")[0] in known:
                chosen[field] = name
                break
    return chosen


def profile(log: Log, rungs: list[str], timeout: float) -> dict[str, dict[str, float]]:
    """The fields of METRICS by rung. RuntimeError where ncu is missing or refuses."""
    ncu = find_ncu()
    if ncu is None:
        raise RuntimeError("ncu not found")
    metrics = chosen_metrics(known_metrics(ncu))
    command = [ncu, "--csv", "--page", "raw", "--print-units", "base", "--profile-from-start", "no"]
    command += ["--clock-control", "none", "--metrics", ",".join(metrics.values())]
    command += [sys.executable, __file__, log.name, ",".join(rungs)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"ncu took more than {timeout:.0f} s") from None
    kernels = parse(done.stdout, metrics)
    if done.returncode != 0 or not kernels:
        lines = [line for line in done.stdout.splitlines() if line.startswith("==")]
        raise RuntimeError(f"ncu: {' '.join(lines[-2:]) or done.stderr[-200:]}")
    return assign(kernels, rungs)


def parse(text: str, metrics: dict[str, str]) -> list[tuple[str, dict[str, float]]]:
    """Name and fields of every kernel in ncu's table, which stands among its other output: a line
    of heads, a line of units, and a line a kernel."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    kernels = []
    for row in csv.DictReader(lines):
        if not row.get("ID"):
            continue  # units
        fields = {}
        for field, name in metrics.items():
            try:
                fields[field] = float(row[name].replace(",", ""))
            except (KeyError, ValueError, AttributeError):
                continue  # not measured
        kernels.append((row["Kernel Name"], fields))
    return kernels


def assign(
    kernels: list[tuple[str, dict[str, float]]], rungs: list[str]
) -> dict[str, dict[str, float]]:
    """By rung. Of plain SDPA, which may launch several kernels, the longest."""
    own = [rung for rung in rungs if rung not in (PORTABLE, HOPPER, SDPA)]
    ladder = [fields for name, fields in kernels if LADDER_KERNEL.search(name)]
    if len(ladder) != len(own):
        raise RuntimeError(f"ncu: must show {len(own)} kernels of the ladder, got {len(ladder)}")
    found = dict(zip(own, ladder, strict=True))
    others: dict[str, list] = {}
    for name, fields in kernels:
        if not LADDER_KERNEL.search(name):
            ours = {"fwd_sm80_kernel": PORTABLE, "fwd_sm90_kernel": HOPPER}
            rung = next((ours[k] for k in ours if k in name), SDPA)
            others.setdefault(rung, []).append(fields)
    for rung, of_rung in others.items():
        if rung in rungs:
            found[rung] = max(of_rung, key=lambda fields: fields.get("us", 0))
    return found


def top_stall(fields: dict[str, float]) -> tuple[str, float] | None:
    """The reason that keeps most warps from issuing, and its share of the cycles between two
    instructions of a warp."""
    stalls = {name: fields[f"stalled_{name}"] for name in STALLS if f"stalled_{name}" in fields}
    if not stalls:
        return None
    name = max(stalls, key=stalls.__getitem__)
    return name, stalls[name] / (1 + sum(stalls.values()))  # 1: the instruction that issues


def main() -> None:
    import ladder_kernels
    import torch
    from ladder import inputs_of

    log, rungs = LOGS[sys.argv[1]], sys.argv[2].split(",")
    if {PORTABLE, HOPPER} & set(rungs):
        import flashattn_ext  # noqa: F401  registers the operators
    library = ladder_kernels.build()
    x = inputs_of(log, torch.device("cuda"))[0]
    calls = [ladder_kernels.bind(library, log, rung, x) for rung in rungs]
    for call in calls:  # what happens only once is over
        call()
    torch.cuda.synchronize()
    for call in calls:
        torch.cuda.cudart().cudaProfilerStart()
        call()
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStop()


if __name__ == "__main__":
    main()
