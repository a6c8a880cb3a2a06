"""The benchmark of the forward: work models, checks, timing, host cost, the two dtypes. Runs
on the CPU in seconds."""

import contextlib
import gc
import json
import math
import shutil
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import bench_prefill  # noqa: E402
import dtype_speed  # noqa: E402
import harness  # noqa: E402
import host_cost  # noqa: E402
import rates  # noqa: E402
import report  # noqa: E402
import workload  # noqa: E402
from workload import Problem  # noqa: E402

CPU = torch.device("cpu")
TINY = harness.Settings(samples=4, sample_ms=0.01, warmup_ms=0.01, reruns=0)
MASKS = ["full", "causal", "window", "bool", "lowest", "-inf"]


def tiny(mask="causal", dtype=torch.float32, **sizes):
    sizes = dict(batch=2, heads_q=4, heads_k=2, seqlen_q=40, seqlen_k=40, head_dim=16) | sizes
    return Problem("tiny", "tiny", **sizes, mask=mask, dtype=dtype, window=7)


# Work models


@pytest.mark.parametrize("left", [-1, 0, 3, 100])
@pytest.mark.parametrize("right", [-1, 0, 2, 100])
@pytest.mark.parametrize("lengths", [(1, 1), (5, 9), (9, 5), (16, 16)])
@pytest.mark.parametrize("bottom_right", [False, True])
def test_kept_pairs_match_brute_force(left, right, lengths, bottom_right):
    seqlen_q, seqlen_k = lengths
    diagonal = seqlen_k - seqlen_q if bottom_right else 0
    expected = sum(
        (left < 0 or j >= i + diagonal - left) and (right < 0 or j <= i + diagonal + right)
        for i in range(seqlen_q)
        for j in range(seqlen_k)
    )
    assert workload.kept_pairs(seqlen_q, seqlen_k, left, right, bottom_right) == expected


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("lengths", [(40, 40), (24, 40), (40, 24)])
def test_useful_flops_count_the_pairs_of_the_mask(mask, lengths):
    problem = tiny(mask, seqlen_q=lengths[0], seqlen_k=lengths[1])
    pairs = workload.visible(problem, torch.arange(problem.seqlen_q)).sum().item()
    assert 0 < pairs <= lengths[0] * lengths[1]
    assert workload.useful_flops(problem) == 4 * 2 * 4 * pairs * 16


@pytest.mark.parametrize("mask", MASKS)
def test_least_bytes_is_the_size_of_the_tensors(mask):
    problem = tiny(mask, dtype=torch.bfloat16)
    x = workload.input_sets(problem, CPU)[0]
    tensors = [x.query, x.key, x.value, torch.empty_like(x.query)]
    if mask in ("bool", "lowest", "-inf"):  # a window needs no mask in memory
        tensors.append(x.mask)
    expected = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    assert workload.least_bytes(problem) == expected


def test_roofline_share():
    row = {"dtype": "float32", "flops": 2e9, "bytes": 4e6}
    row["results"] = {"ours": {"median_us": 1000.0}}
    rates = {"gemm_float32_tflops": 4.0, "copy_gbs": 100.0}  # floors: 500 us and 40 us
    assert harness.roofline_share(row, "ours", rates) == pytest.approx(0.5)
    assert harness.roofline_share(row, "ours", rates | {"copy_gbs": 5.0}) == pytest.approx(0.8)
    assert harness.roofline_share(row, "fa2", rates) is None
    assert harness.roofline_share(row, "ours", {}) is None


# Inputs and reference


@pytest.mark.parametrize("mask", MASKS)
def test_reference_is_attention_over_the_visible_keys(mask):
    problem = tiny(mask)
    x = workload.input_sets(problem, CPU)[0]
    assert x.query.stride() == (40 * 4 * 16, 16, 4 * 16, 1)  # laid out as (B, S, H, D)
    assert x.key.stride() == (40 * 2 * 16, 16, 2 * 16, 1)
    reference = workload.Reference.of(problem, x)
    unseen = 5 if problem.padding else 0
    assert reference.rows.tolist() == list(range(unseen, 40))

    key, value = (t.repeat_interleave(2, dim=1).double() for t in (x.key, x.value))
    scores = x.query.double() @ key.transpose(2, 3) / 4
    if x.mask is None:
        bias = torch.zeros(40, 40, dtype=torch.float64)
        bias[torch.ones(40, 40).triu(1).bool() & (mask == "causal")] = -math.inf
    elif x.mask.dtype == torch.bool:
        bias = torch.zeros(x.mask.shape, dtype=torch.float64).masked_fill(~x.mask, -math.inf)
    else:
        assert x.mask.dtype == torch.float32
        bias = x.mask.double()
    expected = (torch.softmax(scores + bias, -1) @ value)[:, :, unseen:]
    torch.testing.assert_close(reference.out, expected.float(), atol=1e-5, rtol=1e-5)

    out = torch.cat([torch.full_like(x.query[:, :, :unseen], math.nan), expected], 2).float()
    assert reference.error_share(out) < 0.1
    out[1, 2, 30, 3] += 1e-3
    assert reference.error_share(out) > 1
    out[1, 2, 30, 3] = math.nan
    assert math.isnan(reference.error_share(out))


def test_long_problem_checks_the_first_and_the_last_row():
    problem = tiny(seqlen_q=1000, seqlen_k=1000)
    rows = workload.Reference.of(problem, workload.input_sets(problem, CPU)[0]).rows
    assert len(rows) == 256 and rows[0] == 0 and rows[-1] == 999


# Timing


def test_measure_interleaves_and_leaves_the_context_out_of_the_time():
    log = []

    @contextlib.contextmanager
    def slow_context():
        time.sleep(0.1)
        yield
        time.sleep(0.1)

    def launcher(name, seconds):
        def launch(i):
            log.append((name, i))
            time.sleep(seconds)

        return launch

    calls = {
        "a": harness.Call(slow_context, launcher("a", 0.002), sets=2),
        "b": harness.Call(contextlib.nullcontext, launcher("b", 0.006)),
    }
    settings = harness.Settings(samples=4, sample_ms=1.0, warmup_ms=1.0, reruns=0)
    timings, failures = harness.measure(calls, CPU, settings)
    assert failures == {}
    assert timings["a"].launches == 2 and timings["b"].launches == 1
    assert log[-6:] == [("a", 0), ("a", 1), ("b", 0)] * 2
    assert timings["a"].samples == timings["b"].samples == 4
    for name, low in (("a", 2e3), ("b", 6e3)):
        assert timings[name].q1_us <= timings[name].median_us <= timings[name].q3_us
        assert low <= timings[name].q1_us < 50e3


def test_measure_takes_noisy_samples_again(monkeypatch):
    quiet, noisy = [1.0] * 5, [1.0, 1.0, 20.0, 1.0, 20.0]  # the first of each is warm-up
    trial, first_round = [[1.0]], [[1.0]]
    script = iter([trial, first_round, [noisy], [quiet], [noisy]])
    monkeypatch.setattr(harness, "_time_rounds", lambda *arguments: next(script))
    calls = {"a": harness.Call(contextlib.nullcontext, lambda i: None)}
    settings = harness.Settings(samples=4, sample_ms=1.0, warmup_ms=1.0, reruns=2)
    timings, _ = harness.measure(calls, CPU, settings)
    assert (timings["a"].q1_us, timings["a"].q3_us) == (500.0, 500.0)  # two launches a sample
    assert next(script) == [noisy]  # was not asked for


def test_measure_reports_a_call_that_fails():
    def refuse(i):
        raise RuntimeError("head_dim must be even\nmore")

    calls = {
        "bad": harness.Call(contextlib.nullcontext, refuse),
        "good": harness.Call(contextlib.nullcontext, lambda i: None),
    }
    timings, failures = harness.measure(calls, CPU, TINY)
    assert list(timings) == ["good"]
    assert failures == {"bad": "head_dim must be even"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_measure_on_a_gpu_eager_and_graph():
    device = torch.device("cuda")
    a = torch.randn(2, 1024, 1024, device=device)
    out = torch.empty_like(a[0])
    calls = {"mm": harness.Call(contextlib.nullcontext, lambda i: torch.mm(a[i], a[i], out=out), 2)}
    eager, failures = harness.measure(calls, device, harness.QUICK)
    assert failures == {}
    graph, failures = harness.measure(calls, device, harness.QUICK, graph=True)
    assert failures == {}
    assert graph["mm"].launches % 2 == 0
    # 2.1 GFLOP: a time below 2 us would be more than 1000 TFLOPS in fp32
    assert 2 < graph["mm"].median_us <= 1.2 * eager["mm"].median_us
    if shutil.which("nvidia-smi"):
        assert harness.settle(device, 0.1, 0.5)["sm_mhz"].isdigit()


def test_gpu_state_is_that_of_the_device(monkeypatch):
    def read(lines):
        code = f"print({lines!r})"
        query = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        return harness._read_gpu_query(query, torch.device("cuda"))

    properties = types.SimpleNamespace(uuid="12-ab")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    other = "GPU-34-cd, 580.1, 345, 3201, 70.1, 700.00, 30"
    ours = "GPU-12-ab, 580.1, 1755, 3201, 690.25, 700.00, 61"
    state = read(f"{other}\n{ours}")
    assert (state["driver"], state["sm_mhz"], state["power_w"]) == ("580.1", "1755", "690.25")
    assert read(other) == read("") == read("Field is not valid") == {}


@pytest.mark.parametrize("with_tqdm", [True, False])
def test_progress_bar_on_a_terminal(with_tqdm, capsys, monkeypatch):
    if with_tqdm:
        pytest.importorskip("tqdm")
    else:
        monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    progress = harness.Progress(2)
    for line in ("first", "second"):
        progress.advance(line)
    progress.close()
    printed = capsys.readouterr()
    assert "first" in printed.out and "second" in printed.out
    assert "2/2" in printed.err


def test_progress_is_plain_lines_elsewhere(capsys):
    progress = harness.Progress(1)
    progress.advance("only")
    progress.close()
    assert capsys.readouterr() == ("only\n", "")


def test_host_cost_is_that_of_interleaved_batches_without_garbage_collection():
    log = []

    def call(name, seconds):
        def run():
            log.append((name, gc.isenabled()))
            time.sleep(seconds)

        return run

    calls = {"a": call("a", 0.001), "b": call("b", 0.003)}
    timings = host_cost.time_batches(calls, CPU, batches=4, size=2)
    batches = 4 + host_cost.WARMUP_BATCHES
    assert log == [("a", False), ("a", False), ("b", False), ("b", False)] * batches
    assert gc.isenabled()
    assert timings["a"].samples == timings["b"].samples == 4
    assert timings["a"].launches == 2
    assert timings["a"].median_us >= 1e3 and 3e3 <= timings["b"].median_us < 50e3


def test_host_batches_fit_the_launch_queue_and_are_enough():
    assert host_cost.CALLS <= 1024 // 4  # a call may launch several kernels
    assert harness.Settings().samples >= 30
    suite = bench_prefill.gpu_suites()["host"]
    assert {p.dtype for p in suite} == {torch.float16, torch.bfloat16}
    shapes = {(*(getattr(p, f) for f in rates.SHAPE), p.mask) for p in suite}
    assert shapes == {(1, 16, 8, 128, 128, 128, "causal")}


def test_bench_prefill_measures_host_cost_in_its_own_rows(tmp_path, capsys, monkeypatch):
    problem = Problem("host", "host", 1, 4, 2, 16, 16, 16, "causal", torch.float32)
    monkeypatch.setattr(bench_prefill, "cpu_suites", lambda quick: {"host": [problem]})
    monkeypatch.setattr(harness, "ceilings", lambda *arguments: {})
    out = tmp_path / "r.json"
    assert bench_prefill.main(["--device", "cpu", "--quick", "--out", str(out)]) == 0
    result = harness.read_result(out)
    (row,) = result["rows"]
    assert (row["mode"], row["unit"], row["dtype"]) == ("host", "us", "float32")
    assert list(row["results"]) == list(result["host_labels"])
    sdpa = row["results"]["sdpa"]
    for r in row["results"].values():
        assert r["samples"] == harness.QUICK.samples and r["launches"] == host_cost.CALLS
        assert r["ratio_to_sdpa"] == pytest.approx(r["median_us"] / sdpa["median_us"], abs=1e-4)
    assert row["results"]["empty"]["median_us"] < row["results"]["ours"]["median_us"]
    assert "plain SDPA" in capsys.readouterr().out
    assert "| host B1 H4/2 S16 D16 causal fp32" in report.full_block(result)
    assert "| host B1 H4/2 S16 D16 causal fp32" in report.summary_block(result)


def test_host_cost_notes_who_refuses(monkeypatch):
    def refuse():
        raise RuntimeError("query: must be even")

    monkeypatch.setattr(host_cost, "bind", lambda x: {"ours": refuse, "sdpa": lambda: None})
    row = host_cost.run_problem(tiny(), CPU, TINY)
    assert row["results"]["ours"] == {"error": "query: must be even"}
    assert row["results"]["sdpa"]["ratio_to_sdpa"] == 1


# fp16 beside bf16


def test_dtypes_are_measured_on_the_same_values():
    problem = tiny("causal")
    inputs = dtype_speed.paired_inputs(problem, CPU)
    assert list(inputs) == list(dtype_speed.DTYPES)
    ((half,), (brain,)) = inputs.values()
    for name in ("query", "key", "value"):
        a, b = getattr(half, name), getattr(brain, name)
        assert (a.dtype, b.dtype) == (torch.float16, torch.bfloat16)
        assert a.stride() == b.stride() and a.stride(3) == 1
        assert torch.equal(a.bfloat16(), b) and a.std() > 0.5
        assert not torch.equal(a, b.half())  # fp16 keeps the bits that bf16 has no room for
    assert half.query.shape == (2, 4, 40, 16) and half.key.shape == (2, 2, 40, 16)


@pytest.mark.parametrize("refused", [None, "ours_bfloat16", "cudnn_float16"])
def test_dtypes_are_timed_in_one_interleaved_measurement(refused, monkeypatch):
    """Both dtypes of a candidate are neighbours, and the calls still hold their inputs."""
    medians = dict(zip(dtype_speed.LABELS, (100.0, 97.0, 50.0, 51.0), strict=True))
    measured, seen = [], []

    def bind(problem):
        def call(x):
            seen.append(x.query.dtype)
            return bench_prefill.bind_sdpa(problem)(x)

        return call

    def measure(calls, device, settings, graph):
        measured.append((list(calls), settings, graph))
        for call in calls.values():
            call.launch(call.sets - 1)
        times = {n: harness.Timing(us, us, us, 4, 2) for n, us in medians.items() if n != refused}
        return times, {refused: "not captured"} if refused else {}

    monkeypatch.setattr(harness, "measure", measure)
    candidates = [harness.Candidate(name, name, bind) for name in dtype_speed.CANDIDATES]
    row = dtype_speed.run_problem(tiny(), candidates, CPU, TINY)
    assert measured == [(list(dtype_speed.LABELS), TINY, False)]
    assert seen[-4:] == [torch.float16, torch.bfloat16] * 2
    assert list(row["results"]) == list(dtype_speed.LABELS)
    assert row["label"] == "tiny B2 H4/2 S40 D16 causal fp16/bf16"
    assert (row["mode"], row["unit"], row["dtype"]) == ("dtypes", "us", "float16/bfloat16")
    assert row["ratio"] == (None if refused == "ours_bfloat16" else 0.97)
    assert row["cudnn_ratio"] == (None if refused == "cudnn_float16" else 1.02)
    for name, r in row["results"].items():
        if name == refused:
            assert r == {"error": "not captured"}
        else:
            assert r["median_us"] == medians[name] and 0 <= r["error_share"] <= 1


def test_dtypes_suite_has_the_seed_and_every_head_dim():
    suite = bench_prefill.gpu_suites()["dtypes"]
    shapes = {(*(getattr(p, f) for f in rates.SHAPE), p.mask) for p in suite}
    assert len(shapes) == len(suite) == 8 and all(p.graph for p in suite)
    assert {(4, 16, 16, 1024, 1024, 128, "full"), (2, 16, 8, 1024, 1024, 128, "causal")} < shapes
    for heads, head_dim in ((32, 64), (16, 128), (8, 256)):
        for mask in ("full", "causal"):
            assert (4, heads, heads, 4096, 4096, head_dim, mask) in shapes


def test_bench_prefill_measures_dtypes_in_their_own_rows(tmp_path, capsys, monkeypatch):
    problem = Problem("dtypes", "dtypes", 1, 4, 2, 32, 32, 16, "causal", graph=True)
    monkeypatch.setattr(bench_prefill, "cpu_suites", lambda quick: {"dtypes": [problem]})
    monkeypatch.setattr(harness, "ceilings", lambda *arguments: {})
    out = tmp_path / "r.json"
    arguments = ["--device", "cpu", "--quick", "--candidates", "fa2", "--out", str(out)]
    assert bench_prefill.main(arguments) == 0
    result = harness.read_result(out)
    assert "flashattn_ext" in result["environment"]
    (row,) = result["rows"]
    results = row["results"]
    assert list(results) == list(result["dtype_labels"])
    ours = [results[f"ours_{dtype}"] for dtype in dtype_speed.DTYPES]
    assert all(r["samples"] == harness.QUICK.samples for r in ours)
    expected = ours[1]["median_us"] / ours[0]["median_us"]
    assert row["ratio"] == pytest.approx(expected, abs=1e-4)
    assert "backend" in results["cudnn_float16"]["error"] and row["cudnn_ratio"] is None
    label = "dtypes B1 H4/2 S32 D16 causal fp16/bf16"
    assert f"{label}  " in capsys.readouterr().out
    assert f"| {label} |" in report.full_block(result)
    assert label not in report.summary_block(result)


@pytest.mark.parametrize("fault", ["wrong", "refused"])
def test_bench_prefill_fails_on_a_fault_in_one_dtype(fault, tmp_path, capsys, monkeypatch):
    problem = Problem("dtypes", "dtypes", 1, 4, 2, 32, 32, 16, "causal")

    def bind(problem):
        def call(x):
            if x.query.dtype == torch.float16:
                return bench_prefill.bind_sdpa(problem)(x)
            if fault == "refused":
                raise RuntimeError("query: must be even")
            return torch.zeros_like(x.query)

        return call

    monkeypatch.setattr(bench_prefill, "cpu_suites", lambda quick: {"dtypes": [problem]})
    monkeypatch.setattr(harness, "ceilings", lambda *arguments: {})
    ours = harness.Candidate("ours", "ours", bind)
    monkeypatch.setitem(bench_prefill.CANDIDATES, "ours", ours)
    arguments = ["--device", "cpu", "--quick", "--out", str(tmp_path / "r.json")]
    assert bench_prefill.main(arguments) == 1
    printed = capsys.readouterr()
    reason = "query: must be even" if fault == "refused" else "error "
    assert f"FAILED {problem.label()[:-5]} fp16/bf16: ours bf16: {reason}" in printed.err
    assert printed.err.count("FAILED") == 1
    assert ("ours bf16 WRONG" in printed.out) == (fault == "wrong")


# The kernel of a row


@pytest.mark.parametrize("mask", MASKS)
def test_rows_name_the_kernel_that_ours_takes(mask, monkeypatch):
    asked = []

    def forward_kernel(*arguments, **options):
        asked.append((arguments, options))
        return "fwd_sm90 192x80: 3 stages"

    monkeypatch.setattr(torch.ops.fa, "forward_kernel", forward_kernel, raising=False)
    candidates = [bench_prefill.CANDIDATES[name] for name in ("sdpa", "ours")]
    row = harness.run_problem(tiny(mask), candidates, CPU, TINY)
    assert row["kernel"] == "fwd_sm90 192x80: 3 stages"
    (((query, key, value, attn_mask, is_causal, scale), options),) = asked
    assert query.shape == (2, 4, 40, 16) and key.shape == value.shape == (2, 2, 40, 16)
    assert is_causal == (mask in ("causal", "window")) and scale is None
    assert (attn_mask is not None) == (mask in ("bool", "lowest", "-inf"))
    # tiny() gives every problem a window of 7, which only a band reads
    assert options["window_left"] == (7 if is_causal else -1)
    assert options["window_right"] == -1 and options["bottom_right"] is False
    assert "kernel" not in harness.run_problem(tiny(mask), candidates[:1], CPU, TINY)


# The benchmark end to end


def test_bench_prefill_runs_on_the_cpu(tmp_path, capsys):
    out = tmp_path / "cpu.json"
    arguments = ["--device", "cpu", "--quick", "--out", str(out), "--commit", "abc"]
    assert bench_prefill.main([*arguments, "--candidates", "ours,fa2,cudnn,sdpa"]) == 0
    result = harness.read_result(out)
    assert result["environment"]["commit"] == "abc"
    assert result["environment"]["torch"] == torch.__version__
    assert result["ceilings"]["gemm_float32_tflops"] > 0 and result["ceilings"]["copy_gbs"] > 0
    assert len(result["rows"]) == 4
    for row in result["rows"]:
        for name in ("ours", "fa2", "sdpa"):
            r = row["results"][name]
            assert 0 <= r["error_share"] <= 1 and r["samples"] == harness.QUICK.samples
            assert r["tflops"] == pytest.approx(row["flops"] / r["median_us"] * 1e-6, abs=1e-4)
        assert "backend" in row["results"]["cudnn"]["error"]  # refused on the CPU
    assert "4 problems, 0 failures" in capsys.readouterr().out
    assert "| cpu B1 H2 S96 D64 causal fp32" in report.full_block(result)


def test_bench_prefill_fails_on_a_wrong_result_and_does_not_time_it(tmp_path, monkeypatch, capsys):
    def bind(problem):
        return lambda x: torch.zeros_like(x.query)

    wrong = harness.Candidate("fa2", "zeros", bind)
    monkeypatch.setitem(bench_prefill.CANDIDATES, "fa2", wrong)
    monkeypatch.setattr(harness, "ceilings", lambda *arguments: {})
    out = tmp_path / "r.json"
    arguments = ["--device", "cpu", "--quick", "--match", "causal", "--out", str(out)]
    assert bench_prefill.main([*arguments, "--candidates", "fa2,sdpa"]) == 1
    row = json.loads(out.read_text())["rows"][0]
    assert "times the tolerance" in row["results"]["fa2"]["wrong"]
    assert "median_us" not in row["results"]["fa2"] and "median_us" in row["results"]["sdpa"]
    printed = capsys.readouterr()
    assert "zeros WRONG" in printed.out and "FAILED cpu B1 H2 S96 D64 causal" in printed.err


def test_bench_prefill_fails_when_ours_refuses(tmp_path, monkeypatch, capsys):
    def refuse(x):
        raise RuntimeError("query: must be even")

    monkeypatch.setattr(harness, "ceilings", lambda *arguments: {})
    for name in ("ours", "sdpa"):
        refusing = harness.Candidate(name, name, lambda problem: refuse)
        monkeypatch.setitem(bench_prefill.CANDIDATES, name, refusing)
    arguments = ["--device", "cpu", "--quick", "--match", "bool", "--out", str(tmp_path / "r.json")]
    assert bench_prefill.main([*arguments, "--candidates", "fa2,sdpa"]) == 0
    assert bench_prefill.main([*arguments, "--candidates", "ours,fa2"]) == 1
    assert "ours: query: must be even" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["--only", "nothing"], ["--candidates", "ours,x"], ["--match", "D7"]]
)
def test_bench_prefill_refuses_unknown_names(arguments, capsys):
    with pytest.raises(SystemExit):
        bench_prefill.parse_arguments(["--device", "cpu", *arguments])
    assert arguments[0] in capsys.readouterr().err


def test_label_tells_problems_apart():
    problems = [p for suite in bench_prefill.gpu_suites().values() for p in suite]
    labels = [p.label() for p in problems]
    assert len(set(labels)) == len(labels)
    assert "cross B2 H16 S1000x3000 D128 full bf16" in labels
    assert "seed2 B2 H16/8 S1024 D128 causal fp16" in labels
    assert "window B2 H16 S8192 D128 window 1024 bf16" in labels


def test_grid_and_seed_shapes():
    suites = bench_prefill.gpu_suites()
    assert len(suites["grid"]) == 36
    for p in suites["grid"]:
        assert p.batch * p.seqlen_q == 16384 and p.heads_q * p.head_dim == 2048
    seeds = {(*(getattr(p, f) for f in rates.SHAPE), p.mask, p.dtype) for p in suites["seed"]}
    assert (2, 16, 8, 1024, 1024, 128, "causal", torch.float16) in seeds
    assert (4, 16, 16, 1024, 1024, 128, "full", torch.float16) in seeds


def test_every_ratio_of_fa3_belongs_to_a_problem_and_the_grid_is_complete():
    _, ratios = rates.peer_ratios()
    problems = {
        (*(getattr(p, f) for f in rates.SHAPE), p.mask, str(p.dtype).removeprefix("torch."))
        for suite in bench_prefill.gpu_suites().values()
        for p in suite
    }
    assert set(ratios) <= problems
    assert sum(key[-1] == "bfloat16" for key in ratios if key[0] * key[3] == 16384) >= 36
    assert all(0.5 < ratio < 2 for ratio in ratios.values())
