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
    assert len(compiled.kernels) == 2 * len(kernels_of(log))
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
        causal, factor = log.problem.mask == "causal", 1.5 if rung == "whole rows" else 1.0

        def call():
            return factor * F.scaled_dot_product_attention(
                x.query, x.key, x.value, is_causal=causal, enable_gqa=True
            )

        return call

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
    fields = {"ffma": 64.0, "fmul": 32.0, "fadd": 32.0, "stalled_wait": 3.0, "us": 7.0}
    return {rung: fields | {"stalled_barrier": 1.0, "dram_read_bytes": 1e6} for rung in rungs}


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
    assert "wait 60 %" in text and re.search(r"FP32 instructions.*fused", text)
    result = {"schema": 1, "environment": harness.environment(torch.device("cpu")), "rows": [row]}
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


def test_parse_and_assign():
    metrics = {"us": "gpu__time_duration.sum", "ffma": "ffma.sum"}
    text = "\n".join(
        [
            "==PROF== Connected to process 1",
            '"ID","Kernel Name","gpu__time_duration.sum","ffma.sum"',
            '"","","ns","inst"',
            '"0","void column_warps_kernel<V5>(Problem)","1,000","32"',
            '"1","void whole_rows_kernel<0>(Problem)","2000","n/a"',
            '"2","void fa::fwd_sm80_kernel<X>(Y)","3","4"',
            '"3","memset","1","1"',
            '"4","cudnn_generated_fort_native_sdpa","9","1"',
        ]
    )
    kernels = ladder_profile.parse(text, metrics)
    assert len(kernels) == 5
    names = ["V5", "whole rows", PORTABLE, SDPA]
    found = ladder_profile.assign(kernels, names)
    assert found["V5"] == {"us": 1000.0, "ffma": 32.0}
    assert found["whole rows"] == {"us": 2000.0}
    assert found[PORTABLE]["us"] == 3.0 and found[SDPA]["us"] == 9.0
    with pytest.raises(RuntimeError, match="must show 3 kernels of the ladder, got 2"):
        ladder_profile.assign(kernels, ["V6", *names])


def test_metrics_that_the_gpu_lacks_are_left_out():
    known = {"gpu__time_duration", "sm__inst_executed_pipe_tensor"}
    chosen = ladder_profile.chosen_metrics(known)
    assert chosen["us"] == "gpu__time_duration.sum"
    assert chosen["tensor_percent"].startswith("sm__inst_executed_pipe_tensor.")
    assert chosen["registers"] == "launch__registers_per_thread"
    assert "l2_hit_percent" not in chosen


def test_top_stall():
    assert ladder_profile.top_stall({}) is None
    fields = {"stalled_wait": 2.0, "stalled_barrier": 1.0}
    assert ladder_profile.top_stall(fields) == ("wait", 0.5)


def test_readme_comes_from_the_committed_result():
    text = ladder_report.README.read_text()
    assert ladder_report.BLOCK.search(text)
    assert text == ladder_report.regenerate(text)
