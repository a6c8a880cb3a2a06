"""The benchmark of decoding: the paged candidate, speeds and bars. Runs on the CPU in seconds."""

import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import bench_decode  # noqa: E402
import bench_static_cache  # noqa: E402
import decode_rates  # noqa: E402
import harness  # noqa: E402
import report  # noqa: E402
import workload  # noqa: E402
from workload import Problem  # noqa: E402

CPU = torch.device("cpu")


def test_candidates_compute_the_same():
    problem = Problem("decode", "tiny", 3, 4, 2, 2, 256, 16, "full", torch.float32)
    (inputs,) = workload.input_sets(problem, CPU)
    reference = workload.Reference.of(problem, inputs)
    for bind in (candidate.bind for candidate in bench_decode.CANDIDATES[:4]):
        assert reference.error_share(bind(problem)(inputs)) < 1


def test_pages_fit_the_problems():
    problems = bench_decode.gpu_problems() + bench_decode.cpu_problems()
    assert all(p.seqlen_k % size == 0 for p in problems for size in bench_decode.PAGE_SIZES)
    assert len(bench_decode.gpu_problems()) == decode_rates.ROWS
    names = [c.name for c in bench_decode.CANDIDATES[:4]]
    assert names == ["ours", "ours_paged_64", "ours_paged_16", "ours_forward"]
    assert len({p.label() for p in problems}) == len(problems)


def test_command(tmp_path, capsys):
    out = tmp_path / "decode.json"
    arguments = ["--device", "cpu", "--quick", "--match", "S1x", "--out", str(out)]
    assert bench_decode.main(arguments) == 0
    assert "1 problems, 0 failures" in capsys.readouterr().out
    (row,) = harness.read_result(out)["rows"]
    ours = {"ours", "ours_paged_64", "ours_paged_16", "ours_forward"}
    assert ours | {"sdpa"} <= row["results"].keys()
    assert bench_decode.main([*arguments, "--bars"]) == 1  # the bars are those of an H200


def row_of(problem, **us):
    results = {name: {"median_us": value} for name, value in us.items()}
    return harness.problem_fields(problem) | {"results": results}


def result_of(device="NVIDIA H200", **changes):
    """All problems, ours 1.25 times as fast as cuDNN, unless changes say otherwise."""
    us = {"ours": 80.0, "ours_paged_64": 82.0, "ours_paged_16": 83.0}
    us |= {"fa2": 150.0, "cudnn": 100.0, "sdpa": 500.0} | changes
    rows = [row_of(problem, **us) for problem in bench_decode.gpu_problems()]
    return {"environment": {"device": device}, "rows": rows}


def test_speeds():
    problem = Problem("decode", "one", 1, 16, 8, 1, 1024, 128)
    row = row_of(problem, ours=8.0, cudnn=16.0)
    found = bench_decode.speeds(row, "NVIDIA H200")
    read = 2 * 8 * 1024 * 128 * 2  # K and V
    assert found["ours"] == pytest.approx(read / 8e-6 / 1e9)
    assert found["fa3"] == pytest.approx(0.402 * found["cudnn"])
    assert "fa3" not in bench_decode.speeds(row, "another GPU")


def test_bars():
    def names_of_missed(result):
        return [bar.name for bar in bench_decode.bars(result) if not bar.passed]

    assert names_of_missed(result_of()) == []
    for size in (16, 64):
        missed = names_of_missed(result_of(**{f"ours_paged_{size}": 90.0}))
        assert missed == [f"pages of {size}: lowest paged/contiguous"]
    assert names_of_missed(result_of(sdpa=400.0)) == ["8 and 16 queries: lowest ours/plain SDPA"]
    assert "chunk of 256 queries: ours/plain SDPA" in names_of_missed(result_of(sdpa=300.0))
    slower = names_of_missed(result_of(ours=110.0))
    assert slower[:2] == ["one query: geometric mean of ours/best", "one query: lowest ours/best"]
    assert len(names_of_missed(result_of() | {"rows": []})) == 7


def test_report(tmp_path, capsys):
    out = tmp_path / "decode.json"
    arguments = ["--device", "cpu", "--quick", "--match", "S4x", "--out", str(out)]
    assert bench_decode.main(arguments) == 0
    capsys.readouterr()
    assert report.main(["show", str(out)]) == 0
    text = capsys.readouterr().out
    assert text.count("several B2 H8/2 S4x512 D64 full fp32") == 3
    assert "GB/s of K and V" in text and "kernel of fa.forward" in text
    assert report.main(["bars", str(out)]) == 1
    assert capsys.readouterr().out.count("FAIL") == 7


def test_static_cache(tmp_path, capsys):
    pytest.importorskip("transformers")
    out = tmp_path / "static.json"
    arguments = ["--device", "cpu", "--quick", "--out", str(out)]
    assert bench_static_cache.main(arguments) == 0
    assert "1 problems, 0 failures" in capsys.readouterr().out
    assert bench_static_cache.main([*arguments, "--bars"]) == 1
    (row,) = harness.read_result(out)["rows"]
    assert row["filled"] == 100 and {"ours", "sdpa"} == row["results"].keys()


def test_static_cache_sees_a_wrong_length():
    """The reference is that of the filled slots: a mask that shows one more is noticed."""
    ((problem, filled),) = bench_static_cache.cpu_problems().items()
    (inputs,) = workload.input_sets(problem, CPU)
    reference = bench_static_cache.exact(problem, filled, inputs)
    for shown, right in ((filled, True), (filled + 1, False), (filled - 1, False)):
        mask = bench_static_cache.filled_mask(problem, shown, CPU)
        out = bench_static_cache.bind("ours", problem, mask)(inputs)
        assert (reference.error_share(out) < 1) == right
