"""The ladder of the two logs: every rung compiles, the first and the last are right on a GPU, and
tables, plot and profile hold what was measured."""

import ctypes
import math
import os
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import compile_report  # noqa: E402
import harness  # noqa: E402
import ladder  # noqa: E402
import ladder_kernels  # noqa: E402
import ladder_profile  # noqa: E402
import ladder_report  # noqa: E402
from ladder_rungs import HOPPER, LOGS, PORTABLE, SDPA  # noqa: E402

OTHERS = (PORTABLE, HOPPER, SDPA)
each_log = pytest.mark.parametrize("log", LOGS.values(), ids=LOGS)
TINY = harness.Settings(samples=4, sample_ms=0.01, warmup_ms=0.01, reruns=0)


def find_nvcc():
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    nvcc = shutil.which("nvcc", path=str(Path(home, "bin"))) or shutil.which("nvcc")
    return nvcc or pytest.skip("no nvcc found")


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    """All rungs of both logs, compiled as the driver does."""
    find_nvcc()
    if shutil.which("ninja") is None:
        pytest.skip("no ninja found")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path_factory.mktemp("extensions")))
        if not torch.cuda.is_available():
            patch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
        return ladder_kernels.build()


def kernels_of(log):
    return [rung.name for rung in log.rungs if rung.name not in OTHERS]


@each_log
def test_all_rungs_compile_and_keep_to_registers(log, tmp_path):
    source = BENCHMARKS / "ladder" / f"log{log.name}.cu"
    compiled = compile_report.compile_file(find_nvcc(), source, ["sm_80", "sm_90"], tmp_path / "o")
    # A rung at the occupancy of another is the same kernel.
    names = {re.sub(r" at \d CTAs$", "", name) for name in kernels_of(log)}
    assert len(compiled.kernels) == 2 * len(names)
    for kernel in compiled.kernels:
        taken = (kernel.spill_stores, kernel.spill_loads, kernel.stack)
        assert taken == (0, 0, 0) and kernel.registers, kernel
    assert not compiled.findings
    assert compiled.cpu_seconds < 60


@each_log
def test_names_are_those_of_the_kernels(log):
    source = (BENCHMARKS / "ladder" / f"log{log.name}.cu").read_text()
    table = source[source.index("const Rung kRungs[]") :]
    names = re.findall(r'"([^"]+)"', table[: table.index("};")])
    assert names == kernels_of(log)
    assert [rung.name for rung in log.rungs[-3:]] == list(OTHERS)


@each_log
def test_unknown_rungs_and_lengths_are_refused(library, log):
    problem = ladder_kernels.Problem(batch=1, heads_q=2, heads_k=1, seqlen=64)
    with pytest.raises(RuntimeError, match=f"log {log.name}, V0: CUDA error 1"):
        launch = getattr(library, f"log{log.name}_launch")
        if status := launch(b"V0", ctypes.byref(problem), None):
            raise RuntimeError(f"log {log.name}, V0: CUDA error {status}")
    for wrong in ({"seqlen": 63}, {"seqlen": 0}, {"heads_k": 0}, {"heads_q": 3, "heads_k": 2}):
        for field, value in wrong.items():
            setattr(problem, field, value)
        assert launch(kernels_of(log)[0].encode(), ctypes.byref(problem), None) == 1
        problem = ladder_kernels.Problem(batch=1, heads_q=2, heads_k=1, seqlen=64)


@each_log
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
@pytest.mark.parametrize("place", ["first", "last"])
def test_rungs_on_the_gpu(request, device, log, place):
    library = request.getfixturevalue("library")  # only now: `device` may skip
    rung = kernels_of(log)[0 if place == "first" else -1]
    small = replace(log, problem=replace(log.problem, batch=2, seqlen_q=192, seqlen_k=192))
    x = ladder.inputs_of(small, torch.device(device))[0]
    call = ladder_kernels.bind(library, small, rung, x)
    assert ladder.Check(small, x).error_share(call()) <= 1
    facts = ladder_kernels.describe(library, log.name, rung)
    assert facts["local_bytes"] == 0 and facts["ctas_per_sm"] > 0 and facts["registers"] > 0


# A run without a GPU: the rungs are torch's attention, and one of them is wrong.


@pytest.fixture
def fake_rungs(monkeypatch):
    def bind(library, log, rung, x):
        if rung == HOPPER:
            raise RuntimeError("our Hopper: the call would take cpu")
        gqa = log.problem.heads_q != log.problem.heads_k
        causal = log.problem.mask == "causal"
        out = F.scaled_dot_product_attention(
            x.query, x.key, x.value, is_causal=causal, enable_gqa=gqa
        )
        if rung == "whole rows":
            out = 1.5 * out
        return lambda: out  # timed a thousand times

    facts = {"registers": 96, "smem_bytes": 1024, "local_bytes": 0, "ctas_per_sm": 5}
    monkeypatch.setattr(ladder_kernels, "bind", bind)
    monkeypatch.setattr(ladder_kernels, "describe", lambda library, log, rung: facts)


def run(log, monkeypatch, profile):
    small = replace(log, problem=replace(log.problem, batch=1, seqlen_q=64, seqlen_k=64))
    monkeypatch.setattr(ladder_profile, "profile", profile)
    options = ladder.argparse.Namespace(
        device=torch.device("cpu"), settings=TINY, no_ncu=False, out=None
    )
    names = [rung.name for rung in log.rungs]
    progress = harness.Progress(2 * len(names) + 1)
    row = ladder.run_log(small, names, None, options, progress)
    assert progress.done == progress.total
    return row


def fake_profile(log, rungs, timeout):
    fields = {"fused": 1048576, "not_fused": 7, "stalled_wait": 3.0, "stalled_barrier": 1.0}
    phases = {"softmax": 56.25, "shuffles": 31.5}
    return {rung: fields | {"instructions": 5e6, "phases": phases} for rung in rungs}


@each_log
def test_a_run_tells_what_was_wrong_and_goes_on(log, monkeypatch, fake_rungs, tmp_path):
    row = run(log, monkeypatch, fake_profile)
    results = row["results"]
    assert "times the tolerance" in results["whole rows"]["wrong"]
    assert results[HOPPER] == {"error": "our Hopper: the call would take cpu"}
    for name, result in results.items():
        timed = name not in ("whole rows", HOPPER)
        assert ("median_us" in result) == timed == ("ncu" in result)
        assert ("registers" in result) == (name not in OTHERS)
    assert row["log"] == log.name and row["flops"] == harness.useful_flops(
        replace(log.problem, batch=1, seqlen_q=64, seqlen_k=64)
    )

    text = ladder_report.terminal_table(row)
    for rung in log.rungs:
        assert f"| {rung.name} " in text and rung.step in text
    assert "wait 60 %" in text and " 5.0 |" in text and "56.2" in text
    first = log.rungs[0]
    counts = map(str, first.fp32 or "--")
    assert re.search(rf"\| {first.name} *\| *" + r" \| *".join([*counts, "1048576", "7"]), text)
    result = {"schema": 1, "environment": harness.environment(torch.device("cpu")), "rows": [row]}
    (failure,) = ladder.failures(result)
    assert failure.startswith(f"log {log.name}, whole rows: error ")
    results["V5"] = {"error": "no image"}
    assert f"log {log.name}, V5: no image" in ladder.failures(result)
    del results["V5"]
    path = tmp_path / "ladder.json"
    harness.write_result(path, result)
    assert ladder.main(["--show", str(path)]) == 0
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_a_profiler_that_refuses_loses_no_times(monkeypatch, fake_rungs):
    def profile(log, rungs, timeout):
        raise RuntimeError("ncu: no permission")

    row = run(LOGS["002"], monkeypatch, profile)
    assert row["ncu_error"] == "ncu: no permission"
    assert "median_us" in row["results"]["base"]
    assert "no permission" in ladder_report.terminal_table(row)


def test_claimed_ratios():
    log = LOGS["000"]
    assert math.isclose(log.claimed_ratio(log.rung("V7"), "V5"), 135.73 / 130.04)
    assert log.claimed_ratio(log.rung("whole rows"), "V11") is None
    log = LOGS["002"]
    assert math.isclose(log.claimed_ratio(log.rung("skip"), "rows first"), 1380 / 818)
    for log in LOGS.values():
        assert all(log.rung(rung.after) for rung in log.rungs if rung.after)


# ncu's output

RAW_PAGE = """==PROF== Connected to process 1
"ID","Kernel Name","gpu__time_duration.sum","smsp__inst_executed.sum"
"","","ns","inst"
"0","column_warps_kernel","1,000","32"
"1","whole_rows_kernel","2000","n/a"
"2","fwd_sm80_kernel","3","4"
"3","memset","1","1"
"4","cudnn_sdpa","9","1"
"""


def test_parse_and_assign():
    kernels = ladder_profile.parse(RAW_PAGE)
    assert len(kernels) == 5
    names = ["V5", "whole rows", PORTABLE, SDPA]
    found = ladder_profile.assign(kernels, names)
    assert found["V5"] == {"ns": 1000.0, "instructions": 32.0}
    assert found["whole rows"] == {"ns": 2000.0}
    assert found[PORTABLE]["ns"] == 3.0 and found[SDPA]["ns"] == 9.0
    with pytest.raises(RuntimeError, match="must show 3 kernels of the ladder, got 2"):
        ladder_profile.assign(kernels, ["V6", *names])


def source_page(name, lines):
    heads = ["Address", "Source", "Warp Stall Sampling (All Samples)", "# Samples"]
    heads += ["Instructions Executed", "L1 Wavefronts Shared Excessive"]
    table = [["Kernel Name", name], heads]
    table += [["0x10", f"      {text}", n, "0", "1,000", "3"] for text, n in lines]
    return "".join(",".join(f'"{cell}"' for cell in row) + "\n" for row in table)


CODE = [
    ("S2R R0, SR_TID.X", "5"),
    ("BAR.SYNC.DEFER_BLOCKING 0x0", "5"),  # up to here: K
    ("HMMA.16816.F32 R4, R8, R10, R4", "20"),
    ("BAR.SYNC.DEFER_BLOCKING 0x0", "0"),
    ("@!P1 FMUL R2, R2, 0.5", "1"),
    ("SHFL.BFLY PT, R3, R2, 0x10, 0x1f", "2"),
    ("FMNMX R2, R2, R3, !PT", "30"),
    ("FADD R5, R2, -R3", "8"),
    ("MUFU.EX2 R3, R5", "4"),
    ("FFMA R6, R3, R3, R5", "5"),
    ("BAR.SYNC.DEFER_BLOCKING 0x0", "0"),
    ("LDSM.16.M88.4 R8, [R3]", "10"),
    ("BAR.SYNC.DEFER_BLOCKING 0x0", "0"),
    ("STG.E desc[UR4][R2.64], R3", "10"),
]


def test_machine_code():
    """Phases between the barriers; who reads what a shuffle brought, until it is overwritten."""
    name = "void fa::ladder::<unnamed>::column_warps_kernel<fa::ladder::<unnamed>::V5>(Problem)"
    ((found, code),) = ladder_profile.parse_machine_code(source_page(name, CODE))
    assert found == ladder_profile.parse(RAW_PAGE)[0][0] == "column_warps_kernel"
    fields = ladder_profile.read_machine_code(code, phases=True)
    assert fields["fused"] == 1000 and fields["not_fused"] == 2000
    assert fields["excess_wavefronts"] == 3 * len(CODE)
    assert fields["phases"] == {
        **{"K copy": 10.0, "Q K^T": 20.0, "softmax": 50.0, "shuffles": 40.0},
        **{"P V": 10.0, "epilogue": 10.0},
    }
    assert "phases" not in ladder_profile.read_machine_code(code, phases=False)


def test_profile_reads_both_pages(monkeypatch, tmp_path):
    """With an ncu that answers from these pages, and one that refuses."""
    other = source_page("void cudnn_sdpa(X)", [("EXIT", "1")])
    dropped = ('"1"', '"2"', '"3"')
    raw = "".join(f"{line}\n" for line in RAW_PAGE.splitlines() if line[:3] not in dropped)
    source = source_page("void a::column_warps_kernel<b::V5>(c)", CODE) + other
    (tmp_path / "raw").write_text(raw)
    (tmp_path / "source").write_text(source)
    ncu = tmp_path / "ncu"
    ncu.write_text(
        f'#!/bin/sh\ncase "$*" in *--export*) exit $(cat {tmp_path}/status);; '
        f"*--print-source*) cat {tmp_path}/source;; *) cat {tmp_path}/raw;; esac\n"
    )
    ncu.chmod(0o755)
    monkeypatch.setattr(ladder_profile, "find_ncu", lambda: str(ncu))
    (tmp_path / "status").write_text("0")
    found = ladder_profile.profile(LOGS["000"], ["V5", SDPA], 10)
    assert found["V5"]["phases"]["softmax"] == 50.0 and found["V5"]["ns"] == 1000.0
    assert "phases" not in found[SDPA] and found[SDPA]["fused"] == 0
    (tmp_path / "status").write_text("1")
    with pytest.raises(RuntimeError, match="ncu: "):
        ladder_profile.profile(LOGS["000"], ["V5", SDPA], 10)
    monkeypatch.setattr(ladder_profile, "find_ncu", lambda: None)
    with pytest.raises(RuntimeError, match="not found"):
        ladder_profile.profile(LOGS["000"], ["V5"], 10)


def test_top_stall():
    assert ladder_profile.top_stall({}) is None
    fields = {"stalled_wait": 2.0, "stalled_barrier": 1.0}
    assert ladder_profile.top_stall(fields) == ("wait", 0.5)


def test_readme_comes_from_the_committed_result():
    text = ladder_report.README.read_text()
    assert ladder_report.BLOCK.search(text)
    assert text == ladder_report.regenerate(text)
