"""The benchmark of enable(): it runs both ways, and its bars read what it measured."""

import sys
from pathlib import Path

import pytest
import torch
from overriding import kernels_of

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import bench_override  # noqa: E402
import harness  # noqa: E402

import flashattn_ext  # noqa: E402

CPU = torch.device("cpu")


def test_command(tmp_path, capsys):
    pytest.importorskip("transformers", reason="needs transformers")
    out = tmp_path / "override.json"
    arguments = ["--device", "cpu", "--quick", "--samples", "3", "--out", str(out)]
    assert bench_override.main(arguments) == 0
    assert not flashattn_ext.is_enabled()
    printed = capsys.readouterr().out
    rows = harness.read_result(out)["rows"]
    assert f"{len(rows)} problems, 0 failures" in printed
    assert [row["label"] for row in rows] == [p.label() for p in bench_override.cpu_problems()]
    for row in rows:
        assert bench_override.ratio(row) > 0
        assert f"enabled/stock {bench_override.ratio(row):.3f}" in printed
    assert bench_override.main([*arguments, "--match", "plain", "--bars"]) == 1


def test_both_sides_are_what_they_say(monkeypatch):
    """Of the calls that are timed, the enabled ones run our kernels and the others do not."""
    pytest.importorskip("transformers", reason="needs transformers")
    ran = {}

    def measure(calls, device, settings):
        for name, call in calls.items():
            with call.context():
                ran[name] = kernels_of(lambda call=call: call.launch(0))
        return {}, {}

    monkeypatch.setattr(harness, "measure", measure)
    problem = bench_override.cpu_problems()[-1]
    results = bench_override.model_results(problem, CPU, harness.QUICK)
    assert ran == {"ours": (2, 0), "sdpa": (0, 0)}
    assert all(result["error_share"] < 1 for result in results.values())


def test_a_wrong_model_shows(monkeypatch):
    pytest.importorskip("transformers", reason="needs transformers")

    class Wrong:
        """Scales every attention while it is entered."""

        def __enter__(self):
            attention = torch.nn.functional.scaled_dot_product_attention
            self.patch = pytest.MonkeyPatch()
            self.patch.setattr(
                torch.nn.functional,
                "scaled_dot_product_attention",
                lambda *args, **options: 1.5 * attention(*args, **options),
            )

        def __exit__(self, *error):
            self.patch.undo()

    monkeypatch.setattr(bench_override, "enable", lambda device: Wrong())
    problem = bench_override.cpu_problems()[-1]
    results = bench_override.model_results(problem, CPU, harness.QUICK)
    assert "wrong" in results["ours"] and "median_us" not in results["ours"]


def test_bars():
    def rows(host=0.6, model=0.9):
        found = []
        for problem in bench_override.gpu_problems():
            share = host if problem.suite == "host" else model
            results = {"ours": {"median_us": 20.0 * share}, "sdpa": {"median_us": 20.0}}
            found.append(harness.problem_fields(problem) | {"results": results})
        return {"rows": found}

    def missed(result):
        return [bar.name.split(",")[0] for bar in bench_override.bars(result) if not bar.passed]

    assert missed(rows()) == []
    assert missed(rows(host=1.1)) == ["host time of a plain call"]
    assert missed(rows(model=0.95)) == ["qwen3-0.6b"]
    assert len(missed({"rows": []})) == 2
