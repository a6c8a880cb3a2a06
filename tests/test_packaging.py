"""The installed package: tied to its torch, readable when something does not fit, and built with
CUDA where it can be. And the gate of the compile report, on recorded output of the compiler.
"""

import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flashattn_ext

CHECKOUT = Path(__file__).resolve().parent.parent
PACKAGE = Path(flashattn_ext.__file__).parent
sys.path.insert(0, str(CHECKOUT / "benchmarks"))

import compile_report  # noqa: E402

README = (CHECKOUT / "README.md").read_text()
BUDGETS = json.loads((CHECKOUT / "benchmarks/budgets.json").read_text())


def python(code, cwd):
    """The last line a fresh interpreter wrote to stderr."""
    command = [sys.executable, "-W", "ignore", "-c", code]
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    return (result.stderr.splitlines() or [""])[-1]


# The package


def test_metadata_pins_the_minor_version_of_torch():
    major, minor = torch.__version__.split(".")[:2]
    requirements = importlib.metadata.requires("flashattn_ext")
    assert [r for r in requirements if "extra" not in r] == [f"torch=={major}.{minor}.*"]
    assert importlib.metadata.version("flashattn_ext") == flashattn_ext.__version__


@pytest.mark.parametrize("found", ["3.11.0", f"{torch.__version__.split('.')[0]}.999.0"])
def test_another_torch_is_named_in_one_line(found, tmp_path):
    line = python(f"import torch; torch.__version__ = {found!r}; import flashattn_ext", tmp_path)
    assert line.startswith("ImportError: flashattn_ext was built with torch ")
    assert torch.__version__ in line and f"found torch {found}" in line


def test_another_patch_release_of_torch_is_fine(tmp_path):
    version, _, local = torch.__version__.partition("+")
    found = ".".join(version.split(".")[:2]) + ".99" + ("+" + local if local else "")
    assert not python(
        f"import torch; torch.__version__ = {found!r}; import flashattn_ext", tmp_path
    )


@pytest.mark.skipif(flashattn_ext.build_info()["with_cuda"] is False, reason="CPU-only build")
def test_another_cuda_build_of_torch_is_named(tmp_path):
    found = torch.__version__.partition("+")[0] + "+cpu"
    line = python(f"import torch; torch.__version__ = {found!r}; import flashattn_ext", tmp_path)
    assert torch.__version__ in line and f"found torch {found}" in line


def test_source_folder_says_that_it_is_not_installed():
    line = python("import flashattn_ext", CHECKOUT)
    assert line.startswith("ImportError") and "source folder" in line and "pip install" in line


def test_cuda_is_built_where_torch_and_a_toolkit_are():
    info = flashattn_ext.build_info()
    assert info["with_cuda"] == (info["cpu_only_reason"] is None) == bool(info["archs"])
    if info["cpu_only_reason"] is not None:
        assert re.search(r"FA_CPU_ONLY|without CUDA|no nvcc|needs", info["cpu_only_reason"])


def test_the_wheel_holds_the_package_alone():
    files = [str(file) for file in importlib.metadata.files("flashattn_ext")]
    assert [file for file in files if "/_C." in file]
    tops = {file.split("/")[0] for file in files if not file.startswith("..")}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"flashattn_ext"}
    for source in (CHECKOUT / "flashattn_ext").glob("*.py"):
        assert f"flashattn_ext/{source.name}" in files


# README


@pytest.mark.parametrize("name", ["quickstart", "tests"])
def test_readme_command_is_one_line(name):
    """.ci/run takes it from there by this pattern."""
    match = re.search(rf"<!-- command: {name} -->\n```\w*\n(.*)\n```\n", README)
    assert match and match.group(1).startswith("python3 -m venv ")


def test_readme_example_runs(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})


# The compile report

LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN2fa1kI6__halfEEvPT_' for 'sm_80'
ptxas info    : Function properties for _ZN2fa1kI6__halfEEvPT_
    {stack} bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads
ptxas info    : Used {registers} registers, used 1 barriers, 132 bytes smem, 380 bytes cmem[0]
ptxas info    : Compile time = 3.525 ms
ptxas warning : Registers are spilled to local memory in function 'other', 36 bytes spill stores
"""


def check(log, seconds=1.0, tiles=()):
    kernels, findings = compile_report.parse(log)
    for kernel in kernels:
        kernel.name = "fwd_sm80_kernel<...>"
    unit = compile_report.Compilation("x.cu", seconds, kernels, findings)
    return compile_report.violations([unit], list(tiles), BUDGETS)


def test_report_reads_the_compiler():
    (kernel,), findings = compile_report.parse(
        LOG.format(stack=16, stores=8, loads=4, registers=90)
    )
    assert kernel == compile_report.Kernel(
        "_ZN2fa1kI6__halfEEvPT_", "sm_80", 90, 8, 4, 16, smem=132, barriers=1, ptxas_ms=4
    )
    assert findings == []


GOOD = dict(stack=0, stores=0, loads=0, registers=90)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"stack": 16}, "16 bytes of stack"),
        ({"stores": 8}, "8 bytes of spill_stores"),
        ({"loads": 4}, "4 bytes of spill_loads"),
        ({"registers": 256}, "256 registers, limit"),
    ],
)
def test_report_refuses_a_bad_kernel(change, words):
    assert check(LOG.format(**GOOD)) == []
    (line,) = check(LOG.format(**GOOD | change))
    assert words in line and line.startswith("x.cu sm_80 fwd_sm80_kernel")


@pytest.mark.parametrize(
    "line",
    [
        "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are "
        "serialized due to insufficient register resources",
        "ptxas a.ptx, line 417; warning : Program is doing double precision computations.",
        "ptxas warning : setmaxnreg ignored to maintain minimum register requirements",
    ],
)
def test_report_refuses_what_the_compiler_complains_about(line):
    (found,) = check(f"{LOG.format(**GOOD)}{line}\n{line}\n")
    assert found.startswith("x.cu: ")


def test_report_refuses_slow_files_unknown_kernels_and_large_tiles():
    (slow,) = check(LOG.format(**GOOD), seconds=1000.0)
    assert "1000 s" in slow
    (large,) = check(LOG.format(**GOOD), tiles=[["fwd_sm80", 256, 99, 64, 64, 128, 99 * 1024 + 1]])
    assert "head_dim 256" in large and "99 KiB" in large
    kernels, _ = compile_report.parse(LOG.format(**GOOD))
    unit = compile_report.Compilation("x.cu", 1.0, kernels, [])
    (unknown,) = compile_report.violations([unit], [], BUDGETS)
    assert "limit 0" in unknown
