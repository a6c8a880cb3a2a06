"""The benchmark of packed sequences: candidates, work and bars. Runs on the CPU in seconds."""

import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import bench_varlen  # noqa: E402
import harness  # noqa: E402
import report  # noqa: E402
from bench_varlen import PackedProblem  # noqa: E402
from gradients import GradientReference, gradient_flops  # noqa: E402
from workload import Problem, Reference, useful_flops  # noqa: E402

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["forward", "backward"])
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_candidates_compute_the_same(name, mask):
    problem = PackedProblem.of("equal", name, (24,) * 3, 4, 2, 16, mask, dtype=torch.float32)
    (x,) = bench_varlen.input_sets(problem, CPU)
    kind = GradientReference if name == "backward" else Reference
    references = [kind.of(p, c) for p, c in zip(problem.sequences(), x.checks(), strict=True)]
    for prepare in (bench_varlen.prepare_ours, bench_varlen.prepare_dense):
        result = prepare(problem, x)()
        assert bench_varlen.error_share(x, references, result) < 1
        # What is wrong in one sequence alone is noticed.
        wrong = result if name == "forward" else result[0]
        wrong[-1] += 1
        assert bench_varlen.error_share(x, references, result) > 1
        wrong[-1] = torch.nan
        assert not bench_varlen.error_share(x, references, result) <= 1


def test_work_is_that_of_every_sequence():
    problem = PackedProblem.of("mixed", "forward", (5, 1, 9), 4, 2, 8, "causal")
    pairs = 5 * 6 // 2 + 1 + 9 * 10 // 2
    assert problem.total(useful_flops) == 4 * 4 * 8 * pairs
    assert problem.total(gradient_flops) == 10 * 4 * 8 * pairs
    equal = PackedProblem.of("equal", "forward", (9, 9), 4, 2, 8, "full")
    dense = Problem("equal", "forward", 2, 4, 2, 9, 9, 8, "full")
    assert equal.total(useful_flops) == useful_flops(dense)


def test_labels():
    problems = bench_varlen.gpu_problems() + bench_varlen.cpu_problems()
    assert len({p.label() for p in problems}) == len(problems)
    assert all(max(p.lengths) == p.seqlen_q and len(p.lengths) == p.batch for p in problems)


def test_command(tmp_path, capsys):
    out = tmp_path / "varlen.json"
    arguments = ["--device", "cpu", "--quick", "--match", "equal", "--out", str(out)]
    assert bench_varlen.main(arguments) == 0
    assert "2 problems, 0 failures" in capsys.readouterr().out
    rows = harness.read_result(out)["rows"]
    assert [row["name"] for row in rows] == ["forward", "backward"]
    assert all({"ours", "dense"} <= row["results"].keys() for row in rows)
    assert all("no kernel for the CPU" in row["results"]["fa2"]["error"] for row in rows)
    assert report.main(["show", str(out)]) == 0
    assert rows[0]["label"] in capsys.readouterr().out
    assert bench_varlen.main([*arguments, "--bars"]) == 1  # the bars are those of an H200


def test_bars():
    def missed(**changes):
        us = {"ours": 100.0, "dense": 98.0, "fa2": 200.0} | changes
        results = {name: {"median_us": value} for name, value in us.items()}
        rows = [
            harness.problem_fields(problem) | {"results": results}
            for problem in bench_varlen.gpu_problems()
        ]
        return [bar.name for bar in bench_varlen.bars({"rows": rows}) if not bar.passed]

    assert missed() == []
    assert missed(fa2=170.0) == ["mixed lengths, D128 causal: ours/varlen_attn"]
    slower = missed(dense=94.0)
    assert len(slower) == 2 and all(name.startswith("equal lengths") for name in slower)
    assert not any(bar.passed for bar in bench_varlen.bars({"rows": []}))
