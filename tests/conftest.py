"""What every test file shares: the installed build is tested, on each device, with a known seed."""

import contextlib
import os
import random
import sys
import zlib
from pathlib import Path

import pytest
import torch

CHECKOUT = Path(__file__).resolve().parent.parent

# `python -m pytest` puts the working directory first on sys.path, where the source folder
# flashattn_ext, which has no compiled module, would shadow the installed package.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != CHECKOUT]

try:
    import flashattn_ext
except ImportError as error:
    raise pytest.UsageError(f"the tests need the installed package: {error}") from error

if Path(flashattn_ext.__file__).resolve().parent == CHECKOUT / "flashattn_ext":
    raise pytest.UsageError(
        f"flashattn_ext was imported from the source folder {flashattn_ext.__file__}, not from an "
        "installed build: run `pip install .` and unset PYTHONPATH"
    )


def pytest_addoption(parser):
    parser.addoption("--seed", type=int, help="seed of the random inputs (default: a new one)")
    parser.addoption(
        "--full",
        action="store_true",
        help="also the long sweeps (minutes on a GPU, a quarter of an hour on two cores) and "
        "tensors of many GiB",
    )


def pytest_configure(config):
    config.addinivalue_line("markers", "full: runs only with --full")
    if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(workers)))
    if config.option.seed is None:  # set before pytest-xdist hands the options to its workers
        config.option.seed = random.SystemRandom().randrange(2**31)


def no_gpu_reason():
    """Why the CUDA cases cannot run here, or None."""
    if not torch.cuda.is_available():
        return "no CUDA GPU"
    if not flashattn_ext.build_info()["with_cuda"]:
        return "flashattn_ext was built without CUDA"
    capability = torch.cuda.get_device_capability()
    if capability < (8, 0):
        return f"needs compute capability 8.0 or newer, got {capability[0]}.{capability[1]}"
    return None


def pytest_report_header(config):
    reason = no_gpu_reason()
    info = flashattn_ext.build_info()
    return [
        f"seed: {config.option.seed} (repeat this run with --seed {config.option.seed})",
        f"flashattn_ext {info['version']} from {Path(flashattn_ext.__file__).parent}, "
        f"torch {torch.__version__}",
        f"CUDA cases: {'skipped, ' + reason if reason else torch.cuda.get_device_name()}",
    ]


def pytest_collection_modifyitems(config, items):
    if config.option.full:
        return
    for item in items:
        if item.get_closest_marker("full"):
            item.add_marker(pytest.mark.skip(reason="needs --full"))


@pytest.fixture(params=["cpu", "cuda"])
def device(request):
    """Device type as a string; the CUDA variant skips where there is nothing to run it on."""
    if request.param == "cuda" and (reason := no_gpu_reason()):
        pytest.skip(reason)
    return request.param


@pytest.fixture(autouse=True)
def seed(request):
    """Seeds torch for this test alone, so that it repeats outside the whole run too."""
    test_seed = request.config.option.seed ^ zlib.crc32(request.node.name.encode())
    torch.manual_seed(test_seed)
    return test_seed


@pytest.fixture
def free_gpu_memory():
    """A function that skips the test unless the GPU has this many bytes free."""

    def require(needed_bytes):
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        if free < needed_bytes:
            pytest.skip(f"needs {needed_bytes >> 30} GiB of free GPU memory, got {free >> 30}")

    yield require
    with contextlib.suppress(RuntimeError):
        torch.cuda.empty_cache()


@pytest.fixture
def nothing_said(monkeypatch):
    """As in a fresh process: no reason has been given yet."""
    monkeypatch.setattr(flashattn_ext.interface, "_warned", set())
