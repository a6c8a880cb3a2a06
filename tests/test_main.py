"""`python -m flashattn_ext`, the report for bugs: it is complete, and what fails is in it."""

import re
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

import flashattn_ext
import flashattn_ext.__main__ as report

NAMES = [call.name for call in report._CALLS]


def sections(printed):
    """The lines of each call, by its name, and those before the calls."""
    head, _, calls = printed.partition("calls on ")
    blocks = re.split(r"^  (?=\S)", calls, flags=re.MULTILINE)[1:]
    return head, {block.partition(":")[0]: block for block in blocks}


@pytest.fixture
def run_in_process(monkeypatch, capsys):
    monkeypatch.setattr(report, "_SECONDS_OF_TIMING", 0.0)

    def run(*arguments):
        report.main(arguments)
        return sections(capsys.readouterr().out)

    return run


def test_report(device, tmp_path):
    result = subprocess.run(
        [sys.executable, "-m", "flashattn_ext", "--device", device],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    head, calls = sections(result.stdout)
    for text in (torch.__version__, "with_sm90a", "driver", "python"):
        assert text in head
    if device == "cuda":
        assert torch.cuda.get_device_name() in head
    assert list(calls) == NAMES
    for name, text in calls.items():
        assert "error" not in text
        forward = "decode" if name == "decode" else "fwd_"
        kernels = (forward, "bwd_") if device == "cuda" else ("cpu: query is", "cpu: query is")
        for line, kernel in zip(("forward", "backward"), kernels, strict=True):
            assert re.search(rf"^    {line} +{kernel}", text, re.MULTILINE), text
        numbers = re.search(
            r"([\d.]+) ms, torch ([\d.]+) ms, ratio ([\d.]+); largest difference (\S+)", text
        )
        ours, torchs, ratio, difference = (float(number) for number in numbers.groups())
        assert ours > 0 and torchs > 0
        assert ratio == pytest.approx(torchs / ours, rel=0.05, abs=0.01)
        assert difference < (1 if device == "cuda" else 1e-4)  # gradients reach tens, in bfloat16
    assert "time with backward" in calls["training"]


def test_enabled(run_in_process, monkeypatch):
    """The report says so, and the times beside ours are torch's all the same."""
    ran = []
    attention = F.scaled_dot_product_attention

    def watched(*arguments, **options):
        ran.append(flashattn_ext.is_enabled())
        return attention(*arguments, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    with flashattn_ext.enable():
        head, _ = run_in_process("--device", "cpu")
    assert "  enabled             True\n" in head
    assert ran and not any(ran)


def test_device_of_choice(run_in_process):
    """Where CUDA cannot work, the report is on the CPU and still says what the machine has."""
    if torch.cuda.is_available():
        pytest.skip("the machine has a GPU")
    head, calls = run_in_process()
    assert "GPUs                error: " in head
    assert "cpu: query is on the CPU" in calls["prefill"]


def test_what_fails_is_in_the_report(run_in_process, monkeypatch):
    def fails(*arguments, **options):
        raise RuntimeError("no such kernel\nand more lines")

    monkeypatch.setattr(report, "_forward_kernel", fails)
    monkeypatch.setattr(report, "_driver", fails)
    monkeypatch.setattr(F, "scaled_dot_product_attention", fails)
    head, calls = run_in_process("--device", "cpu")
    line = "error: RuntimeError: no such kernel\n"
    assert f"  driver              {line}" in head
    for text in calls.values():
        assert f"    forward             {line}" in text
        assert "    backward            cpu" in text
        assert text.count(line) == 2 and "and more lines" not in text


def test_inputs_that_cannot_be_made(run_in_process):
    if torch.cuda.is_available():
        pytest.skip("the machine has a GPU")
    _, calls = run_in_process("--device", "cuda")
    assert list(calls) == NAMES
    assert all("    inputs              error: " in text for text in calls.values())


@pytest.mark.parametrize("value", [1.0, float("nan")])
def test_wrong_results_show(run_in_process, monkeypatch, value):
    attention = F.scaled_dot_product_attention
    monkeypatch.setattr(
        F,
        "scaled_dot_product_attention",
        lambda *args, **options: attention(*args, **options) + value,
    )
    _, calls = run_in_process("--device", "cpu")
    for text in calls.values():
        assert text.rstrip().endswith(f"largest difference {value:.1e}"), text
