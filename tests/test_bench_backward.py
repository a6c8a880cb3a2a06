"""The benchmark of the backward: its reference, the check of gradients, its rows, tables and
requirements. Runs on the CPU in seconds."""

import math
import sys
import types
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import bars  # noqa: E402
import bench_backward  # noqa: E402
import bench_prefill  # noqa: E402
import compare  # noqa: E402
import gradients  # noqa: E402
import harness  # noqa: E402
import peak_memory  # noqa: E402
import rates  # noqa: E402
import report  # noqa: E402
from bench_backward import DETERMINISTIC, METHODS  # noqa: E402
from gradients import GradientReference, Gradients  # noqa: E402
from workload import Problem, least_bytes, useful_flops  # noqa: E402

CPU = torch.device("cpu")
TINY = harness.Settings(samples=4, sample_ms=0.01, warmup_ms=0.01, reruns=0)


def tiny(mask="causal", dtype=torch.float32, suite="grid", **sizes):
    sizes = dict(batch=2, heads_q=4, heads_k=2, seqlen_q=40, seqlen_k=40, head_dim=16) | sizes
    return Problem(suite, suite, **sizes, mask=mask, dtype=dtype)


def plain_gradients(problem, x, scale):
    """By the formulas, in fp64, one query head after the other."""
    group = problem.heads_q // problem.heads_k
    grads = [torch.zeros(t.shape, dtype=torch.float64) for t in (x.query, x.key, x.value)]
    hidden = torch.ones(problem.seqlen_q, problem.seqlen_k).triu(1).bool()
    for b in range(problem.batch):
        for h in range(problem.heads_q):
            q, do = x.query[b, h].double(), x.grad_out[b, h].double()
            k, v = x.key[b, h // group].double(), x.value[b, h // group].double()
            s = q @ k.T * scale
            if problem.mask == "causal":
                s[hidden] = -math.inf
            p = s.softmax(-1)
            dp = do @ v.T
            ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * scale
            grads[0][b, h] = ds @ k
            grads[1][b, h // group] += ds.T @ q
            grads[2][b, h // group] += p.T @ do
    return Gradients(*(g.to(x.query.dtype) for g in grads))


# Work, inputs and the check


def test_inputs_are_laid_out_as_projections_leave_them():
    x = gradients.gradient_inputs(tiny(), CPU)[0]
    assert x.query.shape == x.grad_out.shape == (2, 4, 40, 16) and x.key.shape == (2, 2, 40, 16)
    assert x.query.stride() == x.grad_out.stride() == (40 * 4 * 16, 16, 4 * 16, 1)
    assert 0.8 < x.grad_out.std() < 1.2 and not torch.equal(x.grad_out, x.query)
    leaves = x.leaves()
    assert leaves.query.requires_grad and leaves.query.data_ptr() == x.query.data_ptr()
    assert leaves.query.stride() == x.query.stride() and not x.query.requires_grad


def test_work_of_a_backward():
    problem = tiny("full", dtype=torch.bfloat16)
    assert gradients.gradient_flops(problem) == 2.5 * useful_flops(problem)
    x = gradients.gradient_inputs(problem, CPU)[0]
    read = [x.query, x.key, x.value, x.query, x.grad_out]  # out is laid out as query
    tensors = [*read, x.query, x.key, x.value]
    lse_bytes = 4 * 2 * 4 * 40
    expected = sum(t.numel() * t.element_size() for t in tensors) + lse_bytes
    assert gradients.gradient_bytes(problem) == expected


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("scale", [None, 0.25, -0.25])
@pytest.mark.parametrize("heads_k", [1, 2, 4])
def test_reference_is_the_gradient_by_its_formulas(mask, scale, heads_k):
    problem = tiny(mask, heads_k=heads_k)
    x = gradients.gradient_inputs(problem, CPU)[0]
    reference = GradientReference.of(problem, x, scale)
    assert len(reference.heads) == 2 * heads_k  # few scores: all heads fit
    grads = plain_gradients(problem, x, 0.25 if scale is None else scale)
    assert reference.error_share(grads) < 0.1
    for i in range(3):  # each of the three is compared, in its last row as well
        for fault in (1e-3, math.nan):
            wrong = [g.clone() for g in grads]
            wrong[i][1, -1, 39, 3] += fault
            share = reference.error_share(Gradients(*wrong))
            assert share > 1 or math.isnan(share)


def test_reference_of_a_large_problem_has_the_first_and_the_last_head(monkeypatch):
    monkeypatch.setattr(gradients, "MOST_SCORES", 3 * 2 * 40 * 40)
    problem = tiny(batch=3)
    x = gradients.gradient_inputs(problem, CPU)[0]
    reference = GradientReference.of(problem, x)
    assert (reference.batches[0], reference.heads[0]) == (0, 0)
    assert (reference.batches[-1], reference.heads[-1]) == (2, 1) and len(reference.heads) == 3
    monkeypatch.setattr(gradients, "MOST_SCORES", 1)
    assert len(GradientReference.of(problem, x).heads) == 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("sign", [1, -1])
def test_check_passes_rounding_and_finds_faults(dtype, mask, sign):
    """The faults are a tenth of a gradient, or one key of one head."""
    problem = tiny(mask, dtype, seqlen_q=200, seqlen_k=200, head_dim=64)
    x = gradients.gradient_inputs(problem, CPU)[0]
    scale = sign * 0.125
    reference = GradientReference.of(problem, x, scale)
    grads = bench_backward.prepare_ours(problem, x, scale)()
    assert reference.error_share(grads) < 0.7
    if sign > 0:  # torch 2.11 on the CPU gives NaN for a negative scale with causal
        assert reference.error_share(bench_backward.prepare_torch(problem, x, scale)()) < 1
    for i in range(3):
        scaled = [g * (1.1 if j == i else 1) for j, g in enumerate(grads)]
        assert reference.error_share(Gradients(*scaled)) > 1.5
    for i in (1, 2):
        cut = [g.clone() for g in grads]
        cut[i][1, 1, 199] = 0
        assert reference.error_share(Gradients(*cut)) > 1.5


# Rows


def test_every_method_is_checked_then_timed():
    methods = [METHODS[name] for name in ("ours", "fa2", "cudnn", "sdpa")]
    row = bench_backward.run_backward(tiny(), methods, CPU, TINY)
    assert (row["direction"], row["mode"], row["dtype"]) == ("backward", "host clock", "float32")
    assert row["flops"] == 2.5 * useful_flops(tiny()) and row["kernel"].startswith("cpu")
    for name in ("ours", "fa2", "sdpa"):
        r = row["results"][name]
        assert 0 <= r["error_share"] <= 1 and r["samples"] == 4
        assert r["tflops"] == pytest.approx(row["flops"] / r["median_us"] * 1e-6, abs=1e-4)
    assert "backend" in row["results"]["cudnn"]["error"]  # refused on the CPU


def test_wrong_gradients_are_not_timed():
    def prepare(problem, x, scale):
        return lambda: Gradients(*map(torch.zeros_like, (x.query, x.key, x.value)))

    zeros = bench_backward.Method("zeros", prepare)
    row = bench_backward.run_backward(tiny(), [zeros, METHODS["sdpa"]], CPU, TINY)
    assert "times the tolerance" in row["results"]["zeros"]["wrong"]
    assert "median_us" not in row["results"]["zeros"]
    assert "median_us" in row["results"]["sdpa"]


def test_deterministic_is_timed_beside_the_default(monkeypatch):
    asked = []
    backward = torch.ops.fa.backward.default

    def listen(*arguments, deterministic):
        asked.append(deterministic)
        return backward(*arguments, deterministic=deterministic)

    packet = types.SimpleNamespace(default=listen)
    monkeypatch.setattr(torch.ops.fa, "backward", packet, raising=False)
    row = bench_backward.run_problem(tiny(suite="deterministic"), [], CPU, TINY)
    assert set(asked) == {False, True}
    results = row["results"]
    assert list(results) == ["ours", DETERMINISTIC]
    expected = results[DETERMINISTIC]["median_us"] / results["ours"]["median_us"]
    assert row["slowdown"] == pytest.approx(expected, abs=1e-4)


def test_deterministic_has_to_repeat():
    calls = []

    def prepare(problem, x, scale):
        grads = plain_gradients(problem, x, scale)

        def step():
            calls.append(1)
            return Gradients(grads.query, grads.key, grads.value * (1 + 1e-6 * len(calls)))

        return step

    method = bench_backward.Method(DETERMINISTIC, prepare)
    row = bench_backward.run_backward(tiny(), [method], CPU, TINY)
    assert row["results"][DETERMINISTIC]["wrong"] == "two runs differ"
    assert "slowdown" not in row and "median_us" not in row["results"][DETERMINISTIC]


def test_portable_is_asked_for_by_a_negative_scale(monkeypatch):
    scales = []
    forward = torch.ops.fa.forward.default

    def listen(*arguments):
        scales.append(arguments[5])
        return forward(*arguments)

    monkeypatch.setattr(torch.ops.fa, "forward", types.SimpleNamespace(default=listen))
    row = bench_backward.run_problem(tiny(suite="portable"), [], CPU, TINY)
    assert set(scales) == {-0.25}
    assert list(row["results"]) == ["ours", "fa2"]
    assert all(r["error_share"] <= 1 and r["median_us"] > 0 for r in row["results"].values())


@pytest.mark.parametrize("suite", ["portable", "grid"])
@pytest.mark.parametrize("kernel", ["bwd_sm80 64x64: reason", "bwd_sm90 64x128: reason"])
def test_rows_name_the_kernel_and_portable_needs_the_portable_one(suite, kernel, monkeypatch):
    asked = []
    monkeypatch.setattr(
        torch.ops.fa, "backward_kernel", lambda *arguments: asked.append(arguments) or kernel
    )
    row = bench_backward.run_problem(tiny(suite=suite), ["ours"], CPU, TINY)
    (grad_out, query, key, value, out, lse, attn_mask, is_causal, scale) = asked[0]
    assert out.shape == query.shape == grad_out.shape and lse.shape == query.shape[:3]
    assert key.shape == value.shape == (2, 2, 40, 16) and attn_mask is None and is_causal
    assert scale == (-0.25 if suite == "portable" else 0.25)
    assert row["kernel"] == kernel
    wrong = suite == "portable" and kernel.startswith("bwd_sm90")
    assert ("wrong" in row["results"]["ours"]) == wrong
    assert ("median_us" in row["results"]["ours"]) != wrong


def test_stack_runs_all_forwards_then_all_backwards():
    log = []

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, query, key, value):
            ctx.layer = sum(name == "forward" for name, _ in log)
            log.append(("forward", ctx.layer))
            ctx.save_for_backward(query, key, value)
            return query.clone()

        @staticmethod
        def backward(ctx, grad):
            log.append(("backward", ctx.layer))
            return ctx.saved_tensors

    slow = harness.Candidate("log", "log", lambda p: lambda x: Attention.apply(*x_of(x)))
    problem = tiny(suite="stack")
    row = bench_backward.run_stack(problem, [slow], CPU, TINY, layers=3)
    assert log[:6] == [
        *(("forward", layer) for layer in range(3)),
        *(("backward", layer) for layer in (2, 1, 0)),
    ]
    assert "wrong" in row["results"]["log"]
    row = bench_backward.run_problem(problem, [], CPU, TINY)
    assert list(row["results"]) == ["ours", "sdpa"] and row["direction"] == "both"
    assert row["layers"] == bench_backward.LAYERS == 28
    assert row["flops"] == 28 * 3.5 * useful_flops(problem)
    assert row["bytes"] == 28 * (least_bytes(problem) + gradients.gradient_bytes(problem))
    assert all(r["median_us"] > 0 for r in row["results"].values())


def x_of(x):
    return x.query, x.key, x.value


def test_peak_memory_is_that_of_the_second_call_above_what_was_there(monkeypatch):
    state = types.SimpleNamespace(now=0, peak=0, calls=0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: state.now)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: state.peak)
    monkeypatch.setattr(
        torch.cuda, "reset_peak_memory_stats", lambda device: setattr(state, "peak", state.now)
    )

    def bind(problem):
        def call(x):
            assert x.query.requires_grad
            state.calls += 1
            state.now += 100 if state.calls == 1 else 0  # stays
            state.peak = max(state.peak, state.now + 40 * state.calls)
            return x.query * 1.0 + x.key.sum() + x.value.sum()

        return call

    def refuse(problem):
        return bench_prefill.CANDIDATES["cudnn"].bind(problem)

    candidates = [
        harness.Candidate("ours", "ours", bind),
        harness.Candidate("cudnn", "cuDNN", refuse, bench_prefill.CANDIDATES["cudnn"].context),
    ]
    row = peak_memory.run_problem(tiny(suite="memory"), candidates, CPU)
    assert row["results"]["ours"] == {"peak_bytes": 80} and state.calls == 2
    assert "backend" in row["results"]["cudnn"]["error"]
    assert (row["mode"], row["unit"]) == ("memory", "bytes")


# Problems


def test_grid_is_what_fa3_was_measured_on():
    gpu, ratios = rates.peer_ratios("backward")
    grid = bench_backward.gpu_suites()["grid"]
    cells = {(*(getattr(p, f) for f in rates.SHAPE), p.mask, "bfloat16") for p in grid}
    assert set(ratios) == cells and len(grid) == 12 and gpu == rates.peer_ratios()[0]
    assert all(1 < ratio < 1.3 for ratio in ratios.values())
    for p in grid:
        assert p.batch * p.seqlen_q == 16384 and p.heads_q * p.head_dim == 2048
        assert p.dtype == torch.bfloat16


def test_suites():
    suites = bench_backward.gpu_suites()
    labels = [p.label() for suite in suites.values() for p in suite]
    assert len(set(labels)) == len(labels)
    assert len(suites["deterministic"]) == len(suites["portable"]) == 12
    assert {p.dtype for p in suites["dtype"]} == {torch.float16}
    assert {p.head_dim for p in suites["dtype"]} == {64, 128, 256}
    assert labels.count("stack B1 H16/8 S8192 D128 causal bf16") == 1
    assert {p.head_dim for p in suites["memory"]} == {64, 128, 256}
    assert set(bench_backward.cpu_suites(True)) == set(suites) - {"memory"}


def test_fa3_has_a_ratio_for_each_direction():
    problem = Problem("grid", "grid", 8, 32, 32, 2048, 2048, 64, "full")
    row = harness.problem_fields(problem) | {"results": {"cudnn": {"tflops": 100.0}}}
    gpu = "NVIDIA H200"
    assert rates.speeds(row, gpu)["fa3"] == pytest.approx(113.3)
    assert rates.speeds(row | {"direction": "forward"}, gpu)["fa3"] == pytest.approx(113.3)
    assert rates.speeds(row | {"direction": "backward"}, gpu)["fa3"] == pytest.approx(116.7)
    assert "fa3" not in rates.speeds(row | {"direction": "both"}, gpu)


# The benchmark end to end


@pytest.fixture
def no_ceilings(monkeypatch):
    monkeypatch.setattr(harness, "ceilings", lambda *arguments: {})


def test_bench_backward_runs_on_the_cpu(tmp_path, capsys, no_ceilings):
    out = tmp_path / "cpu.json"
    arguments = ["--device", "cpu", "--quick", "--samples", "3", "--out", str(out)]
    assert bench_backward.main([*arguments, "--commit", "abc"]) == 0
    result = harness.read_result(out)
    assert result["benchmark"] == "backward" and result["environment"]["commit"] == "abc"
    suites = bench_backward.cpu_suites(quick=True)
    assert [row["suite"] for row in result["rows"]] == [p.suite for s in suites.values() for p in s]
    printed = capsys.readouterr().out
    assert "7 problems, 0 failures" in printed and report.backward_summary(result) in printed
    full = report.backward_full(result)
    for row in result["rows"]:
        assert f"| {row['label']} " in full and row["label"] in printed
    assert report.main(["show", str(out)]) == 0
    assert full in capsys.readouterr().out
    assert compare.compare(result, result, "ours", None)[1] == []
    assert report.main(["bars", str(out)]) == 1


@pytest.mark.parametrize("fault", ["wrong", "refused"])
def test_bench_backward_fails_on_a_fault_of_ours(fault, tmp_path, capsys, monkeypatch, no_ceilings):
    def prepare(problem, x, scale):
        if fault == "refused":
            raise RuntimeError("query: must be even")
        return lambda: Gradients(*map(torch.zeros_like, (x.query, x.key, x.value)))

    monkeypatch.setitem(METHODS, "ours", bench_backward.Method("ours", prepare))
    arguments = ["--device", "cpu", "--quick", "--only", "grid", "--match", "full"]
    assert bench_backward.main([*arguments, "--out", str(tmp_path / "r.json")]) == 1
    printed = capsys.readouterr()
    reason = "query: must be even" if fault == "refused" else "error "
    assert f"FAILED grid B1 H2 S48 D64 full fp32: ours: {reason}" in printed.err
    assert printed.err.count("FAILED") == 1  # cuDNN may refuse


@pytest.mark.parametrize(
    "arguments",
    [["--only", "memory"], ["--candidates", "ours,x"], ["--match", "D7"], ["--samples", "1"]],
)
def test_bench_backward_refuses_unknown_names(arguments, capsys):
    with pytest.raises(SystemExit):
        bench_backward.parse_arguments(["--device", "cpu", *arguments])
    assert arguments[0] in capsys.readouterr().err


# Tables and requirements


def sufficient():
    """A result of a GPU in which every bar is passed: ours is 1.1 times as fast as the best, 1.2
    times in the stack."""
    rows = []
    for problem in (p for suite in bench_backward.gpu_suites().values() for p in suite):
        row = harness.problem_fields(problem) | {"direction": "backward", "mode": "events"}
        row |= {"flops": 1, "bytes": 1, "input_sets": 1}
        rows.append(row)
        tflops = {"ours": 110.0, "fa2": 80.0, "cudnn": 90.0, "sdpa": 90.0}
        if problem.suite == "grid":
            _, ratios = rates.peer_ratios("backward")
            key = (*(row[f] for f in rates.SHAPE), row["mask"], row["dtype"])
            tflops["cudnn"] = 100 / ratios[key]
        elif problem.suite == "deterministic":
            tflops = {"ours": 110.0, DETERMINISTIC: 100.0}
            row["slowdown"] = 1.1 if problem.mask == "full" else 1.21
        elif problem.suite == "portable":
            tflops = {"ours": 110.0, "fa2": 100.0}
        elif problem.suite == "stack":
            tflops = {"ours": 120.0, "sdpa": 100.0}
            row["direction"] = "both"
        elif problem.suite == "memory":
            row |= {"mode": "memory", "unit": "bytes"}
            peaks = {"ours": 300, "fa2": 400, "cudnn": 200}
            row["results"] = {name: {"peak_bytes": n << 20} for name, n in peaks.items()}
            row["results"]["sdpa"] = {"error": "No available kernel"}
            continue
        row["results"] = {
            name: {"tflops": rate, "median_us": 1e4 / rate, "q1_us": 1e4 / rate, "error_share": 0.2}
            | {"q3_us": 1.01e4 / rate}
            for name, rate in tflops.items()
        }
    labels = {
        name: bench_prefill.CANDIDATES[name].label for name in bench_backward.DEFAULT_CANDIDATES
    }
    return {
        "schema": harness.SCHEMA,
        "benchmark": "backward",
        "labels": labels,
        "environment": {
            "device": "NVIDIA H200",
            "torch": "2.11.0",
            "commit": "0123456789abcdef",
            "dirty": False,
            "date": "2026-01-01 00:00 UTC",
        },
        "ceilings": {"gemm_bfloat16_tflops": 700.0},
        "ceilings_after": {},
        "rows": rows,
    }


BARS = {  # name: (value in sufficient(), value to fail with, rows to slow down)
    "grid: geometric mean of ours/best": (1.1, 0.94, lambda r: r["suite"] == "grid"),
    "portable: geometric mean of ours/FA2": (1.1, 1.04, lambda r: r["suite"] == "portable"),
    "stack, forward and backward: ours/plain SDPA": (1.2, 1.09, lambda r: r["suite"] == "stack"),
}


def bar_of(result, name):
    (bar,) = [bar for bar in bars.backward_bars(result) if bar.name == name]
    return bar


@pytest.mark.parametrize("name", BARS)
def test_bar_is_passed_and_missed(name):
    value, low, keep = BARS[name]
    result = sufficient()
    assert bar_of(result, name).value == pytest.approx(value) and bar_of(result, name).passed
    for row in filter(keep, result["rows"]):
        row["results"]["ours"]["tflops"] *= low / value
    assert bar_of(result, name).value == pytest.approx(low) and not bar_of(result, name).passed
    del next(filter(keep, result["rows"]))["results"]["ours"]
    assert bar_of(result, name).value is None and not bar_of(result, name).passed


def test_bar_on_cudnn_is_on_every_cell():
    name = "grid: lowest ours/cuDNN"
    result = sufficient()
    lowest = min(rates.peer_ratios("backward")[1].values())
    assert bar_of(result, name).value == pytest.approx(1.1 * lowest) and bar_of(result, name).passed
    row = result["rows"][5]
    row["results"]["ours"]["tflops"] = 0.99 * row["results"]["cudnn"]["tflops"]
    assert bar_of(result, name).notes == [f"0.990  {row['label']}"]
    assert not bar_of(result, name).passed
    assert bar_of(result, "grid: geometric mean of ours/best").passed


def test_report_prints_the_bars_and_the_tables(tmp_path, capsys, monkeypatch):
    results = tmp_path / "results"
    results.mkdir()
    path = results / "backward.json"
    harness.write_result(path, sufficient())
    assert report.main(["bars", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and all(line.startswith("pass  ") for line in lines)
    assert "aim 1.05 reached" in lines[0]

    monkeypatch.setattr(report, "RESULTS", results)
    page = tmp_path / "README.md"
    frame = "<!-- benchmark {} backward.json -->\n{}<!-- end benchmark -->\n"
    page.write_text(frame.format("summary", "") + frame.format("full", ""))
    assert report.main(["update", str(page)]) == 0
    summary, full = report.backward_summary(sufficient()), report.backward_full(sufficient())
    assert page.read_text() == frame.format("summary", summary + "\n") + frame.format(
        "full", full + "\n"
    )


def cells(text, first):
    line = next(line for line in text.splitlines() if line.startswith(f"| {first} "))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_summary_has_the_grid_the_portable_kernel_the_stack_and_memory():
    text = report.backward_summary(sufficient())
    labels = ["ours", "FA2 (torch)", "cuDNN", "plain SDPA", "FA3 (by ratio)"]
    assert cells(text, "grid (cells)")[1:6] == labels
    assert cells(text, "all (12)")[-2:] == ["1.10", "1.10"]
    assert cells(text, "portable (cells)")[1:3] == ["ours", "FA2 (torch)"]
    stack = cells(text, "stack B1 H16/8 S8192 D128 causal bf16")
    assert stack[1:] == ["120", "-", "-", "100", "-", "-", "1.20"]
    assert "1.15 times as long (geometric mean of 12 cells; at most 1.21)" in text
    memory = cells(text, "memory B2 H32 S8192 D64 causal bf16")
    assert memory[1:] == ["300.0", "400.0", "200.0", "-", "1.50"]


def test_full_block_has_every_problem_and_its_kernel():
    result = sufficient()
    result["rows"][0]["kernel"] = "bwd_sm90 64x128: reason"
    text = report.backward_full(result)
    for row in result["rows"]:
        assert f"| {row['label']} " in text
    line = cells(text, "deterministic B8 H32 S2048 D64 full bf16")
    assert line[1:5] == ["events", "90.9", "1.0 %", "-"]
    table = report.deterministic_table(report.suite_rows(result, "deterministic"))
    assert cells(table, "deterministic B8 H32 S2048 D64 full bf16")[1:] == ["90.9", "100.0", "1.10"]
    assert (
        cells(report.noise_table(result), "grid B8 H32 S2048 D64 full bf16")[-1]
        == "bwd_sm90 64x128"
    )


def test_plot_says_backward(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    titles = []
    suptitle = Figure.suptitle
    monkeypatch.setattr(
        Figure, "suptitle", lambda self, t, **kw: titles.append(t) or suptitle(self, t, **kw)
    )
    path = tmp_path / "plot.png"
    report.plot(sufficient(), path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert titles == ["Attention backward, bfloat16, 16k tokens, NVIDIA H200"]
