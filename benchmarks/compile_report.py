"""What the compiler makes of every kernel: registers, spills, stack, shared memory, time.

    python benchmarks/compile_report.py [--check] [--arch sm_80 ...] [file.cu ...]

Compiles each csrc/kernels/*.cu for every arch, the Hopper files (*_sm90.cu) for sm_90a alone, with
the flags of the build (csrc/nvcc_flags.txt). Needs nvcc only: no GPU, no torch. --check exits with
1 on a spill, on local memory, on double precision, on serialised tensor-core instructions, and on
what exceeds budgets.json. The machine code of the Hopper kernels is read too where there is
cuobjdump, of the toolkit or of `pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm`.
"""

import argparse
import concurrent.futures
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HOPPER_ARCH = "sm_90a"
# Lines of ptxas that are findings whatever kernel they belong to. The numbered ones are advice on
# wgmma and setmaxnreg, not all of it with these words: "(C7519) warpgroup.arrive is injected ...".
FINDINGS = re.compile(r"\(C\d{4}\)|Potential Performance Loss|double precision|setmaxnreg")
# Instructions of the machine code of a Hopper kernel: products by the warpgroup's unit, loads past
# registers, by TMA or cp.async (one of a tuple is enough), and nothing of its registers in local
# memory.
HOPPER_NEEDS = (("HGMMA",), ("UTMALDG", "LDGSTS"))
HOPPER_REFUSES = ("LDL", "STL")


@dataclass
class Kernel:
    """One kernel on one architecture; sizes in bytes."""

    name: str
    arch: str
    registers: int = 0
    spill_stores: int = 0
    spill_loads: int = 0
    stack: int = 0
    smem: int = 0  # static; for dynamic shared memory see tile_table
    barriers: int = 0
    ptxas_ms: int = 0
    instructions: Counter | None = None  # by opcode; of Hopper kernels, where there is cuobjdump


@dataclass
class Compilation:
    """One source file, all architectures."""

    source: str
    cpu_seconds: float  # user + system of nvcc and its children: other load does not change it
    kernels: list[Kernel]
    findings: list[str]


# The sizes that are chosen at run time, from the describe_* functions of kernels/launch.h.
HEAD_DIMS = (64, 128, 256)
TILE_PROGRAM = """
#include <cstdio>
#include <initializer_list>
#include "kernels/launch.h"
int main() {
  for (const fa::KernelShape& s : {%s})
    std::printf("%%d %%d %%d %%d\\n", s.block_m, s.block_n, s.threads, s.smem_bytes);
}
"""


def is_hopper(source: Path) -> bool:
    return source.stem.endswith("_sm90")


def parse(log: str) -> tuple[list[Kernel], list[str]]:
    """Kernels and findings in the output of `nvcc -Xptxas=-v`."""
    kernels: list[Kernel] = []
    findings: list[str] = []
    arch = ""
    for line in log.splitlines():
        if FINDINGS.search(line):
            # The place is a line of a temporary file: drop it, and with it the repetitions.
            finding = re.sub(r"^ptxas \S+, line \d+; | in around line \d+", "", line)
            findings += [finding] if finding not in findings else []
        if match := re.search(r"Compiling entry function .* for '(\S+)'", line):
            arch = match.group(1)
        if match := re.search(r"Function properties for (\S+)", line):
            kernels.append(Kernel(match.group(1), arch))
        elif kernels and not line.startswith("ptxas warning"):  # those name what info lines count
            kernel = kernels[-1]
            for field, pattern in (
                ("stack", r"(\d+) bytes stack frame"),
                ("spill_stores", r"(\d+) bytes spill stores"),
                ("spill_loads", r"(\d+) bytes spill loads"),
                ("registers", r"Used (\d+) registers"),
                ("barriers", r"used (\d+) barriers"),
                ("smem", r"(\d+) bytes smem"),
            ):
                if match := re.search(pattern, line):
                    setattr(kernel, field, int(match.group(1)))
            if match := re.search(r"Compile time = ([\d.]+) ms", line):
                kernel.ptxas_ms = round(float(match.group(1)))
    return kernels, findings


def run_nvcc(arguments: list) -> tuple[str, float]:
    """Runs nvcc; its output and CPU seconds. Exits with the output if it fails."""
    with tempfile.TemporaryFile("w+") as log_file:
        process = subprocess.Popen(arguments, stdout=log_file, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
        log_file.seek(0)
        log = log_file.read()
    if status != 0:
        errors = re.sub(r"^(ptxas info .*|.* bytes stack frame.*)\n", "", log, flags=re.MULTILINE)
        sys.exit(f"{shlex.join(map(str, arguments))}\n{errors}compile report: nvcc failed")
    return log, usage.ru_utime + usage.ru_stime


def archs_of(source: Path, archs: list[str]) -> list[str]:
    """Those of archs that the file has kernels for; a Hopper kernel is empty elsewhere."""
    return [arch for arch in archs if arch == HOPPER_ARCH or not is_hopper(source)]


def compile_file(nvcc: str, source: Path, archs: list[str], output: Path) -> Compilation:
    flags = shlex.split((ROOT / "csrc/nvcc_flags.txt").read_text(), comments=True)
    for arch in archs_of(source, archs):
        flags += ["-gencode", f"arch={arch.replace('sm', 'compute')},code={arch}"]
    command = [nvcc, "-c", "-Xptxas=-v", *flags, f"-I{ROOT / 'csrc'}", source, "-o", output]
    log, cpu_seconds = run_nvcc(command)
    kernels, findings = parse(log)
    return Compilation(source.name, cpu_seconds, kernels, findings)


def find_cuobjdump(nvcc: str) -> Path | None:
    """Of the toolkit, from PATH, or of the packages of PyPI; nvdisasm has to lie beside it."""
    folders = [Path(nvcc).parent, *os.get_exec_path()]
    folders += [path for entry in sys.path for path in Path(entry).glob("nvidia/cu*/bin")]
    for folder in folders:
        tool = shutil.which("cuobjdump", path=folder)
        if tool is not None and shutil.which("nvdisasm", path=folder):
            return Path(tool)
    return None


def parse_sass(text: str) -> dict[str, Counter]:
    """Instructions by opcode, without modifiers, of each function in `cuobjdump -sass`."""
    functions: dict[str, Counter] = {}
    name = ""
    for line in text.splitlines():
        if match := re.match(r"\s+Function : (\S+)", line):
            name = match.group(1)
            functions[name] = Counter()
        elif match := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\w*)", line):
            functions[name][match.group(1)] += 1
    return functions


def read_machine_code(cuobjdump: Path, kernels: list[Kernel], output: Path) -> None:
    """Fills in the instructions of the kernels in an object file, by their linker names."""
    path = os.pathsep.join([str(cuobjdump.parent), os.environ.get("PATH", "")])
    command = [cuobjdump, "-sass", output]
    environment = {**os.environ, "PATH": path}  # cuobjdump calls nvdisasm
    process = subprocess.run(command, env=environment, capture_output=True, text=True)
    if process.returncode != 0:
        sys.exit(f"{shlex.join(map(str, command))}\n{process.stderr}compile report: failed")
    functions = parse_sass(process.stdout)
    for kernel in kernels:
        kernel.instructions = functions.get(kernel.name, Counter())


def tile_table(nvcc: str, objects: list[Path], budgets: dict, hopper: bool, folder: Path) -> list:
    """Rows of kernel, head_dim, device, its limit in KiB, block_m, block_n, threads, bytes of
    dynamic shared memory."""
    limits = budgets["smem_limits_kib"]
    rows = [["fwd_sm80", d, device, limits[device]] for device in limits for d in HEAD_DIMS]
    calls = [f"fa::describe_fwd_sm80({d}, {kib << 10})" for _, d, _, kib in rows]
    # Without a mask the band is unlimited; with a mask tensor there is one shape.
    modes = [(shape, "kBand") for shape in enumerators()["FwdTileShape"]] + [("kTall", "kTensor")]
    for shape, mode in modes if hopper else ():
        rows += [[f"fwd_sm90 {shape} {mode}", d, "9.0", limits["9.0"]] for d in HEAD_DIMS]
        hints = f"fa::FwdTileShape::{shape}, fa::MaskMode::{mode}"
        calls += [f"fa::describe_fwd_sm90({d}, {hints})" for d in HEAD_DIMS]
    program, source = folder / "tiles", folder / "tiles.cpp"
    source.write_text(TILE_PROGRAM % ", ".join(calls))
    run_nvcc([nvcc, "-std=c++17", f"-I{ROOT / 'csrc'}", source, *objects, "-o", program])
    output = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    sizes = [list(map(int, line.split())) for line in output.splitlines()]
    return [row + size for row, size in zip(rows, sizes, strict=True)]


def enumerators() -> dict[str, list[str]]:
    """The enums that are template arguments of kernels or choices of a tile, in their order."""
    headers = (ROOT / "csrc/params.h", ROOT / "csrc/kernels/launch.h")
    text = re.sub("//.*", "", "".join(header.read_text() for header in headers))
    return {
        enum: re.findall(r"\bk[A-Z]\w*", body)
        for enum, body in re.findall(r"enum class (\w+) : int {(.*?)}", text, re.DOTALL)
    }


def demangle(kernels: list[Kernel]) -> None:
    """Replaces linker names by readable ones, without return type and arguments."""
    tool = shutil.which("cu++filt") or shutil.which("c++filt")
    if tool is None or not kernels:
        return
    names = "\n".join(kernel.name for kernel in kernels)
    output = subprocess.run([tool], input=names, capture_output=True, text=True, check=True).stdout
    enums = enumerators()

    def enumerator(match: re.Match) -> str:  # (fa::MaskMode)1 -> kBand
        return enums[match[1]][int(match[2])] if match[1] in enums else match[0]

    for kernel, name in zip(kernels, output.splitlines(), strict=True):
        name = re.sub(r"\(fa::(\w+)\)(\d+)", enumerator, name)
        name = re.sub(r"^void |fa::|\(anonymous namespace\)::", "", name).replace("> >", ">>")
        kernel.name = re.sub(r"\(.*$", "", name)


def violations(compilations: list[Compilation], tiles: list[list], budgets: dict) -> list[str]:
    """What --check refuses, one line each."""
    result = []
    for unit in compilations:
        result += [f"{unit.source}: {finding}" for finding in unit.findings]
        limit = budgets["file_cpu_seconds"]
        if unit.cpu_seconds > limit:
            result.append(f"{unit.source}: {unit.cpu_seconds:.0f} s to compile, limit {limit}")
        for kernel in unit.kernels:
            where = f"{unit.source} {kernel.arch} {kernel.name}"
            for what in ("spill_stores", "spill_loads", "stack"):
                if size := getattr(kernel, what):
                    result.append(f"{where}: {size} bytes of {what}")
            matches = [key for key in budgets["registers"] if kernel.name.startswith(key)]
            limit = budgets["registers"][max(matches, key=len)] if matches else 0
            if kernel.registers > limit:
                result.append(f"{where}: {kernel.registers} registers, limit {limit}")
            if kernel.instructions is not None:
                counts = kernel.instructions
                missing = [ops for ops in HOPPER_NEEDS if not any(counts[op] for op in ops)]
                found = [op for op in HOPPER_REFUSES if counts[op]]
                result += [f"{where}: no {' or '.join(ops)} in the machine code" for ops in missing]
                result += [f"{where}: {counts[op]} {op}, local memory" for op in found]
    for name, head_dim, _, kib, *_, smem_bytes in tiles:
        if smem_bytes > kib << 10:
            result.append(
                f"{name} head_dim {head_dim}: {smem_bytes} bytes of shared memory, {kib} KiB"
            )
    return result


def print_table(header: list[str], rows: list[list]) -> None:
    """First column left, the others right."""
    table = [[str(cell) for cell in row] for row in [header, *rows]]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for first, *rest in table:
        cells = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        print("  ".join([first.ljust(widths[0]), *cells]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, help="default: all of csrc/kernels")
    parser.add_argument("--arch", nargs="+", help="default: the archs of budgets.json")
    parser.add_argument("--check", action="store_true", help="exit with 1 on a violation")
    args = parser.parse_args()

    budgets = json.loads((ROOT / "benchmarks/budgets.json").read_text())
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    nvcc = shutil.which("nvcc", path=str(Path(home, "bin"))) or shutil.which("nvcc")
    if nvcc is None:
        print("compile report: skipped, no nvcc found")
        return 0
    archs = args.arch or budgets["archs"]
    files = args.files or sorted((ROOT / "csrc/kernels").glob("*.cu"))
    files = [file for file in files if archs_of(file, archs)]
    hopper = any(map(is_hopper, files))
    cuobjdump = find_cuobjdump(nvcc)
    with tempfile.TemporaryDirectory() as name:
        objects = [Path(name, f"{file.stem}.o") for file in files]
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            jobs = [
                pool.submit(compile_file, nvcc, *job, archs, output)
                for *job, output in zip(files, objects, strict=True)
            ]
            compilations = [job.result() for job in jobs]
        for file, output, unit in zip(files, objects, compilations, strict=True):
            if cuobjdump is not None and is_hopper(file):
                read_machine_code(cuobjdump, unit.kernels, output)
        # Only all files together link.
        tiles = [] if args.files else tile_table(nvcc, objects, budgets, hopper, Path(name))

    for unit in compilations:
        print(f"\n{unit.source}: {unit.cpu_seconds:.1f} s of CPU time")
        demangle(unit.kernels)
        fields = [
            "registers",
            "spill_stores",
            "spill_loads",
            "stack",
            "smem",
            "barriers",
            "ptxas_ms",
        ]
        rows = [[k.name, k.arch, *(getattr(k, f) for f in fields)] for k in unit.kernels]
        print_table(["kernel", "arch", *fields], sorted(rows))
        opcodes = (*itertools.chain(*HOPPER_NEEDS), *HOPPER_REFUSES)
        counts = [
            [k.name, *(k.instructions[opcode] for opcode in opcodes)]
            for k in unit.kernels
            if k.instructions is not None
        ]
        if counts:
            print_table(["machine code", *opcodes], sorted(counts))
    if hopper and cuobjdump is None:
        print("\nMachine code of the Hopper kernels: not read, no cuobjdump and nvdisasm found")
    if tiles:
        print("\nTiles and dynamic shared memory of a CTA")
        print_table(
            ["kernel", "head_dim", "device", "smem limit", "block_m", "block_n", "threads", "smem"],
            [[*row[:3], row[3] << 10, *row[4:]] for row in tiles],
        )

    found = violations(compilations, tiles, budgets)
    print(f"\n{len(files)} files, {len(found)} violations")
    for line in found:
        print(f"  {line}")
    return 1 if args.check and found else 0


if __name__ == "__main__":
    sys.exit(main())
