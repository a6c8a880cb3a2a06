"""examples/cpp: the library in a C++ program without Python, and a model of AOTInductor in it."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.cpp_extension import CUDA_HOME, get_cxx_compiler

import flashattn_ext

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "cpp"


def run(*command, folder):
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_library_needs_no_python():
    """It is linked to no library of Python's, and wants no symbol of them."""
    if shutil.which("nm") is None:
        pytest.skip("needs nm")
    library = flashattn_ext.LIBRARY
    output = run("nm", "-D", "--undefined-only", library, folder=".")
    symbols = [line.split()[-1] for line in output.splitlines()]
    assert any("c10" in symbol for symbol in symbols)
    assert not [symbol for symbol in symbols if symbol.startswith(("Py", "_Py", "THP"))]


@pytest.mark.full
def test_program(tmp_path):
    if shutil.which("cmake") is None or shutil.which(get_cxx_compiler()) is None:
        pytest.skip("needs cmake and a C++ compiler")
    if torch.version.cuda is not None and CUDA_HOME is None:
        pytest.skip("torch's CMake files need the CUDA toolkit that torch was built for")
    run(sys.executable, EXAMPLE / "export_model.py", tmp_path, folder=tmp_path)
    prefix = f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"
    run("cmake", "-B", "build", "-S", EXAMPLE, prefix, folder=tmp_path)
    run("cmake", "--build", "build", folder=tmp_path)
    library = flashattn_ext.LIBRARY
    output = run("build/attention", library, "model.pt2", "example.pt", folder=tmp_path)
    lines = re.findall(r"^(\S+): largest difference (\S+)$", output, re.MULTILINE)
    assert [name for name, _ in lines] == ["fa::forward", "model"], output
    assert all(float(difference) < 0.05 for _, difference in lines)
