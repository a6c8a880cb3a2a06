"""Every file in examples/ runs at toy size, as a user would run it."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parent.parent
EXAMPLES = sorted(path.name for path in (CHECKOUT / "examples").glob("*.py"))

# Arguments besides --device, where {tmp} is a folder, and what must stand in the output.
TRAINING = ["--steps", "4", "--seqlen", "32", "--batch", "2", "--layers", "1"]
ARGUMENTS = {
    "paged_decode.py": ["--new-tokens", "8"],
    "train_qwen3.py": [*TRAINING, "--out", "{tmp}/curves.png"],
    "qwen3.py": ["--prompt-length", "32", "--new-tokens", "4"],
    "qwen3_transformers.py": ["--prompt-length", "32", "--new-tokens", "4"],
}
PRINTED = {
    "paged_decode.py": ["pages of 16", "largest difference"],
    "train_qwen3.py": ["torch", "ours", "final loss", "largest difference of the losses"],
    "quickstart.py": ["ours", "torch", "largest error"],
    "qwen3.py": ["prefill", "tokens/s", "largest logit difference"],
    "qwen3_transformers.py": ["eager", "sdpa", "fa_ext", "first 4 of 4"],
}
NEEDS = {"qwen3_transformers.py": "transformers", "train_qwen3.py": "transformers"}


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(device, name, tmp_path):
    needed = NEEDS.get(name)
    if needed and importlib.util.find_spec(needed) is None:
        pytest.skip(f"needs {needed}")
    arguments = [text.format(tmp=tmp_path) for text in ARGUMENTS.get(name, [])]
    result = subprocess.run(
        [sys.executable, f"examples/{name}", "--device", device, *arguments],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    for text in PRINTED.get(name, []):
        assert text in result.stdout, result.stdout
    assert not re.search(r"\bnan\b", result.stdout)
    if name == "quickstart.py":
        check_quickstart(result.stdout)
    if name == "train_qwen3.py":
        check_training(result, tmp_path / "curves.png")


def check_quickstart(printed):
    """Our errors are at most twice those of torch, and both outputs begin with the same numbers."""
    rows = [line.split() for line in printed.splitlines()]
    ours = [row[2:7] for row in rows if row[1:2] == ["ours"]]
    torchs = [row[1:6] for row in rows if row[:1] == ["torch"]]
    assert len(ours) == len(torchs) > 0
    for row, torch_row in zip(ours, torchs, strict=True):
        *numbers, error = (float(number) for number in row)
        *torch_numbers, torch_error = (float(number) for number in torch_row)
        assert 0 < error <= 2 * torch_error
        for number, torch_number in zip(numbers, torch_numbers, strict=True):
            assert abs(number - torch_number) <= error + torch_error + 1e-4  # four decimals


def check_training(result, picture):
    """Ours is trained by our own backward, and to the losses of torch."""
    assert "no kernel for" not in result.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
    rows = [line.split() for line in result.stdout.splitlines()]
    torchs, ours = ([float(x) for x in row[2:]] for row in rows if row[:1] in (["torch"], ["ours"]))
    for (first, final), name in ((torchs, "torch"), (ours, "ours")):
        assert 5 < first < 6 and final < first, name  # log(256) is 5.5
    assert torchs == pytest.approx(ours, abs=0.02)
