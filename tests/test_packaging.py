"""The installed package: tied to its torch, readable when something does not fit, and built with
CUDA where it can be. And the gate of the compile report, on recorded output of the compiler.
"""

import importlib.metadata
import json
import re
import runpy
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

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
    assert info["with_sm90a"] == bool({"9.0a", "9.0a+PTX"} & set(info["archs"]))
    if info["cpu_only_reason"] is not None:
        assert re.search(r"FA_CPU_ONLY|without CUDA|no nvcc|needs", info["cpu_only_reason"])


def test_the_wheel_holds_the_package_alone():
    files = [str(file) for file in importlib.metadata.files("flashattn_ext")]
    assert [file for file in files if "/_C." in file]
    assert "flashattn_ext/libflashattn_ext.so" in files
    tops = {file.split("/")[0] for file in files if not file.startswith("..")}
    tops -= {"__pycache__", *(top for top in tops if top.endswith(".dist-info"))}
    # What stands beside the package is what torch imports in every program.
    assert tops == {"flashattn_ext", "flashattn_ext_autoload"}
    for source in (CHECKOUT / "flashattn_ext").glob("*.py"):
        assert f"flashattn_ext/{source.name}" in files


# What setup.py builds


@pytest.fixture
def setup_py(monkeypatch, tmp_path):
    """A function that runs setup.py with an arch list, beside a toolkit that fits torch, and gives
    the sources and macros it would build."""
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho release 13.0\n")
    nvcc.chmod(0o755)
    (tmp_path / "include").mkdir()
    for header in ("cuda_runtime_api.h", "cublas_v2.h", "cusparse.h", "cusolverDn.h"):
        (tmp_path / "include" / header).touch()

    def make(name, sources, *, define_macros, **_):
        return SimpleNamespace(sources=sources, macros=dict(define_macros))

    built = {}
    tools = SimpleNamespace(
        CUDA_HOME=str(tmp_path),
        BuildExtension=object,
        CppExtension=make,
        CUDAExtension=make,
        get_cxx_compiler=lambda: "sh",  # only looked up
    )
    monkeypatch.setitem(sys.modules, "torch.utils.cpp_extension", tools)
    monkeypatch.setitem(sys.modules, "setuptools", SimpleNamespace(setup=built.update))
    monkeypatch.setitem(sys.modules, "pybind11", SimpleNamespace(get_include=lambda: ""))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("MAX_JOBS", "1")

    def run(archs, cpu_only="0"):
        monkeypatch.setenv("FA_CPU_ONLY", cpu_only)
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", archs)
        runpy.run_path(str(CHECKOUT / "setup.py"))
        operators, _ = built["ext_modules"]
        return operators

    return run


@pytest.mark.parametrize(
    ("archs", "hopper"),
    [
        ("", True),
        ("8.0+PTX;9.0a", True),
        ("8.0 9.0a+PTX", True),
        ("9.0a", True),
        ("9.0", False),
        ("8.0;9.0+PTX", False),
        ("8.6;12.0+PTX", False),
        ("10.0a", False),
    ],
)
def test_hopper_kernels_are_built_for_9_0a(setup_py, capsys, archs, hopper):
    extension = setup_py(archs)
    kernels = {Path(source).name for source in extension.sources if source.endswith(".cu")}
    assert {"fwd_sm80.cu", "mask_summary.cu"} <= kernels
    assert ("fwd_sm90.cu" in kernels) == hopper
    assert extension.macros["FA_WITH_SM90A"] == int(hopper)
    assert f"with_sm90a {hopper}," in capsys.readouterr().out


def test_a_cpu_only_build_has_no_kernels(setup_py, capsys):
    extension = setup_py("9.0a", cpu_only="1")
    assert not [source for source in extension.sources if "csrc/kernels" in source]
    assert extension.macros["FA_WITH_SM90A"] == extension.macros["FA_WITH_CUDA"] == 0
    assert "with_sm90a False," in capsys.readouterr().out


@pytest.mark.parametrize("archs", ["9.0;9.0a", "8.0;9.0+PTX;9.0a", "9.0a+PTX 9.0"])
def test_two_binaries_for_one_hopper_gpu_are_refused(setup_py, archs):
    with pytest.raises(SystemExit, match=r"must not have both 9\.0 and 9\.0a"):
        setup_py(archs)


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
        "ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored; unable to "
        "determine register count at entry.",
        "ptxas info    : (C7519) warpgroup.arrive is injected in around line 2949 by compiler to "
        "allow use of registers in GMMA in function 'k'",
        "ptxas warning : setmaxnreg.dec has register count (40) which is larger than the largest "
        "temporal register count in the program (32)",
    ],
)
def test_report_refuses_what_the_compiler_complains_about(line):
    (found,) = check(f"{LOG.format(**GOOD)}{line}\n{line.replace('2949', '3000')}\n")
    assert found.startswith("x.cu: ")


def test_report_refuses_slow_files_unknown_kernels_and_large_tiles():
    (slow,) = check(LOG.format(**GOOD), seconds=1000.0)
    assert "1000 s" in slow
    tile = ["fwd_sm80", 256, "8.6", 99, 64, 64, 128]
    assert check(LOG.format(**GOOD), tiles=[[*tile, 99 * 1024]]) == []
    (large,) = check(LOG.format(**GOOD), tiles=[[*tile, 99 * 1024 + 1]])
    assert "head_dim 256" in large and "99 KiB" in large
    kernels, _ = compile_report.parse(LOG.format(**GOOD))
    unit = compile_report.Compilation("x.cu", 1.0, kernels, [])
    (unknown,) = compile_report.violations([unit], [], BUDGETS)
    assert "limit 0" in unknown


SASS = """\
	code for sm_90a
		Function : _ZN2fa1kI6__halfEEvPT_
	.headerflags	@"EF_CUDA_TEXMODE_UNIFIED EF_CUDA_64BIT_ADDRESS"
        /*0000*/                   LDC R1, c[0x0][0x28] ;                         /* 0x00 */
                                                                                  /* 0x00 */
        /*0010*/               @P0 UTMALDG.4D [UR8], [UR4], desc[UR6] ;           /* 0x00 */
        /*0020*/             @!UP1 HGMMA.64x128x16.F32.BF16 R24, gdesc[UR20] ;    /* 0x00 */
        /*12340*/                  HGMMA.64x128x16.F32.BF16 R24, gdesc[UR20] ;    /* 0x00 */
		Function : other
        /*0000*/                   STL.64 [R1+0x8], R2 ;                          /* 0x00 */
"""


def test_report_reads_machine_code():
    assert compile_report.parse_sass(SASS) == {
        "_ZN2fa1kI6__halfEEvPT_": Counter(LDC=1, UTMALDG=1, HGMMA=2),
        "other": Counter(STL=1),
    }


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"HGMMA": 0}, "no HGMMA"),
        ({"UTMALDG": 0}, "no UTMALDG"),
        ({"LDL": 3}, "3 LDL, local memory"),
        ({"STL": 2}, "2 STL, local memory"),
    ],
)
def test_report_refuses_machine_code_without_hopper_units(change, words):
    def check_instructions(counts):
        kernel = compile_report.Kernel("fwd_sm90_kernel<...>", "sm_90a", instructions=counts)
        unit = compile_report.Compilation("x.cu", 1.0, [kernel], [])
        return compile_report.violations([unit], [], BUDGETS)

    good = Counter(HGMMA=40, UTMALDG=10, FFMA=100)
    assert check_instructions(good) == []
    (line,) = check_instructions(Counter({**good, **change}))
    assert words in line and line.startswith("x.cu sm_90a fwd_sm90_kernel")


def test_report_compiles_hopper_files_for_hopper_alone():
    archs = ["sm_80", "sm_90a"]
    assert compile_report.archs_of(Path("fwd_sm80.cu"), archs) == archs
    assert compile_report.archs_of(Path("fwd_sm90.cu"), archs) == ["sm_90a"]
    assert compile_report.archs_of(Path("fwd_sm90.cu"), ["sm_80"]) == []
