"""What Nsight Compute says of every rung: the tensor pipe, why warps stall and where, the caches,
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
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from ladder_rungs import HOPPER, LOGS, PORTABLE, SDPA, Log

STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
STALLS = [
    *("barrier", "branch_resolving", "dispatch_stall", "drain", "gmma", "imc_miss"),
    *("lg_throttle", "long_scoreboard", "math_pipe_throttle", "membar", "mio_throttle", "misc"),
    *("no_instruction", "not_selected", "short_scoreboard", "sleeping", "tex_throttle", "wait"),
]
LIMITS = ("blocks", "registers", "shared_mem", "warps")  # of the CTAs of an SM
METRICS = {
    "ns": "gpu__time_duration.sum",
    "tensor_percent": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "issue_percent": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "warps_per_scheduler": "smsp__warps_active.avg.per_cycle_active",
    "instructions": "smsp__inst_executed.sum",
    "branches": "sm__sass_inst_executed_op_branch.sum",
    "shared_wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
    "l2_hit_percent": "lts__t_sector_hit_rate.pct",
    "l2_sectors": "lts__t_sectors.sum",
    "dram_read_bytes": "dram__bytes_read.sum",
    "dram_write_bytes": "dram__bytes_write.sum",
    "registers": "launch__registers_per_thread",
    "dynamic_smem_bytes": "launch__shared_mem_per_block_dynamic",
    "static_smem_bytes": "launch__shared_mem_per_block_static",
    "threads": "launch__block_size",
    "ctas": "launch__grid_size",
    **{f"limit_{name}": f"launch__occupancy_limit_{name}" for name in LIMITS},
    **{f"stalled_{name}": STALL.format(name) for name in STALLS},
}
# A ladder's kernels run in the order of their rungs, each rung one kernel.
LADDER_KERNEL = re.compile(r"column_warps_kernel|column_blocks_kernel|whole_rows_kernel")
# Of log000.cu: what its barriers stand between, the last parts first.
PHASES = ("epilogue", "P V", "softmax", "Q K^T", "K copy")

Fields = dict[str, float | dict[str, float]]


def find_ncu() -> str | None:
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("ncu") or shutil.which("ncu", path=str(Path(home, "bin")))


def profile(log: Log, rungs: list[str], timeout: float) -> dict[str, Fields]:
    """The fields of METRICS and those of read_machine_code, by rung. RuntimeError where ncu is
    missing or refuses."""
    ncu = find_ncu()
    if ncu is None:
        raise RuntimeError("ncu not found")

    def run(*arguments: str) -> str:
        try:
            done = subprocess.run(
                [ncu, *arguments], capture_output=True, text=True, timeout=timeout
            )
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"ncu took more than {timeout:.0f} s") from None
        if done.returncode != 0:
            lines = [line for line in done.stdout.splitlines() if line.startswith("==")]
            raise RuntimeError(f"ncu: {' '.join(lines[-2:]) or done.stderr[-200:]}")
        return done.stdout

    with tempfile.TemporaryDirectory() as folder:
        report = str(Path(folder, "ladder.ncu-rep"))
        options = ["--profile-from-start", "no", "--clock-control", "none"]
        options += ["--section", "SourceCounters", "--metrics", ",".join(METRICS.values())]
        script = [sys.executable, __file__, log.name, ",".join(rungs)]
        run("--export", report, *options, *script)
        read = ("--import", report, "--csv", "--print-units", "base", "--page")
        kernels = parse(run(*read, "raw"))
        code = parse_machine_code(run(*read, "source", "--print-source", "sass"))
    if [name for name, _ in kernels] != [name for name, _ in code]:
        raise RuntimeError("ncu: its pages must show the same kernels")
    for (name, fields), (_, instructions) in zip(kernels, code, strict=True):
        fields |= read_machine_code(instructions, name == "column_warps_kernel")
    return assign(kernels, rungs)


def short_name(kernel: str) -> str:
    """Without scopes and arguments: the pages write those differently."""
    plain = re.sub(r"\(anonymous namespace\)|<unnamed>", "", kernel)
    return re.split(r"[<(]", plain)[0].rpartition("::")[2].removeprefix("void ")


def parse(text: str) -> list[tuple[str, Fields]]:
    """Name and fields of every kernel in ncu's table, which stands among its other output: a line
    of heads, a line of units, and a line a kernel."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    kernels = []
    for row in csv.DictReader(lines):
        if not row.get("ID"):
            continue  # units
        fields: Fields = {}
        for field, name in METRICS.items():
            try:
                fields[field] = float(row[name].replace(",", ""))
            except (KeyError, ValueError, AttributeError):
                continue  # not measured
        kernels.append((short_name(row["Kernel Name"]), fields))
    return kernels


def assign(kernels: list[tuple[str, Fields]], rungs: list[str]) -> dict[str, Fields]:
    """By rung. Of plain SDPA, which may launch several kernels, the longest."""
    own = [rung for rung in rungs if rung not in (PORTABLE, HOPPER, SDPA)]
    ladder = [fields for name, fields in kernels if LADDER_KERNEL.search(name)]
    if len(ladder) != len(own):
        raise RuntimeError(f"ncu: must show {len(own)} kernels of the ladder, got {len(ladder)}")
    found = dict(zip(own, ladder, strict=True))
    others = defaultdict(list)
    for name, fields in kernels:
        if not LADDER_KERNEL.search(name):
            ours = {"fwd_sm80_kernel": PORTABLE, "fwd_sm90_kernel": HOPPER}
            others[next((ours[k] for k in ours if k in name), SDPA)].append(fields)
    for rung in set(rungs) & others.keys():
        found[rung] = max(others[rung], key=lambda fields: fields.get("ns", 0))
    return found


# ------------------------------------------------------------------------------------------------
# Machine code


@dataclass
class Instruction:
    opcode: str  # without modifiers
    registers: list[str]  # in the order of the text
    executed: int  # by warps
    samples: int  # of warps that stood at it
    excess: int  # wavefronts of shared memory beyond the least


def parse_machine_code(text: str) -> list[tuple[str, list[Instruction]]]:
    """The instructions of every kernel in ncu's source page, by the kernel's name."""
    kernels: list[tuple[str, list[Instruction]]] = []
    heads: list[str] = []
    for row in csv.reader(line for line in text.splitlines() if line.startswith('"')):
        if row[0] == "Kernel Name":
            kernels.append((short_name(row[1]), []))
        elif row[0] == "Address":
            heads = row
        elif kernels and heads:
            cells = dict(zip(heads, row, strict=False))
            match = re.match(r"\s*(?:@!?U?P\w+\s+)?([A-Z]\w*)\S*(.*)", cells["Source"])
            if match is None:
                continue
            counts = (
                int(cells[name].replace(",", ""))
                for name in (
                    "Instructions Executed",
                    "Warp Stall Sampling (All Samples)",
                    "L1 Wavefronts Shared Excessive",
                )
            )
            registers = re.findall(r"\bR\d+", match[2])
            kernels[-1][1].append(Instruction(match[1], registers, *counts))
    return kernels


def read_machine_code(code: list[Instruction], phases: bool) -> Fields:
    """FP32 instructions of warps, fused and not, wavefronts of shared memory that bank conflicts
    cost, and for the kernel of log 000 where its warps stand: percent of the samples by phase, and
    of those that wait for a shuffle in the softmax."""

    def executed(*opcodes: str) -> int:
        return sum(i.executed for i in code if i.opcode in opcodes)

    fields: Fields = {
        "fused": executed("FFMA"),
        "not_fused": executed("FADD", "FMUL"),
        "excess_wavefronts": sum(i.excess for i in code),
    }
    if phases:
        parts: list[list[Instruction]] = [[]]
        for instruction in code:
            parts[-1].append(instruction)
            if instruction.opcode == "BAR":
                parts.append([])
        total = max(1, sum(i.samples for i in code))
        shares: dict[str, float] = defaultdict(float)
        for i, part in enumerate(reversed(parts)):  # the first have the start of the kernel too
            name = PHASES[min(i, len(PHASES) - 1)]
            shares[name] += 100 * sum(i.samples for i in part) / total
        shares["shuffles"] = 100 * shuffle_samples(parts[-1 - PHASES.index("softmax")]) / total
        fields["phases"] = {name: round(share, 2) for name, share in shares.items()}
    return fields


def shuffle_samples(code: list[Instruction]) -> int:
    """Samples at shuffles, and at the instructions that read what they bring."""
    shuffled: set[str] = set()
    samples = 0
    for instruction in code:
        if instruction.opcode == "SHFL" or shuffled & set(instruction.registers[1:]):
            samples += instruction.samples
        if instruction.registers and not instruction.opcode.startswith("ST"):
            target = instruction.registers[0]
            (shuffled.add if instruction.opcode == "SHFL" else shuffled.discard)(target)
    return samples


def top_stall(fields: Fields) -> tuple[str, float] | None:
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
