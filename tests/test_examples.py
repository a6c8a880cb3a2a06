"""Every file in examples/ runs at toy size, as a user would run it."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parent.parent
EXAMPLES = sorted(path.name for path in (CHECKOUT / "examples").glob("*.py"))

# Arguments besides --device, and what must stand in the output.
ARGUMENTS = {
    "qwen3.py": ["--prompt-length", "32", "--new-tokens", "4"],
    "qwen3_transformers.py": ["--prompt-length", "32", "--new-tokens", "4"],
}
PRINTED = {
    "quickstart.py": ["ours", "torch", "largest error"],
    "qwen3.py": ["prefill", "tokens/s", "largest logit difference"],
    "qwen3_transformers.py": ["eager", "sdpa", "fa_ext", "first 4 of 4"],
}
NEEDS = {"qwen3_transformers.py": "transformers"}


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(device, name):
    needed = NEEDS.get(name)
    if needed and importlib.util.find_spec(needed) is None:
        pytest.skip(f"needs {needed}")
    result = subprocess.run(
        [sys.executable, f"examples/{name}", "--device", device, *ARGUMENTS.get(name, [])],
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
