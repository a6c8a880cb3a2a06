"""Exact attention from our own CUDA and CPU kernels, in the shape of torch's own operator."""

import importlib
from pathlib import Path

import torch

try:
    from ._build import CPU_ONLY_REASON, TORCH_VERSION  # written by setup.py
except ModuleNotFoundError:
    raise ImportError(
        f"{__file__} is the source folder, which has no compiled module: install the package with "
        "`pip install .` and import it from outside the checkout"
    ) from None


def _same_binary(built: str, found: str) -> bool:
    """Whether two torch versions such as '2.11.0+cu130' share minor version and CUDA build."""
    (built_version, _, built_local), (found_version, _, found_local) = (
        version.partition("+") for version in (built, found)
    )
    same_minor = built_version.split(".")[:2] == found_version.split(".")[:2]
    return same_minor and (CPU_ONLY_REASON is not None or built_local == found_local)


# Before anything is loaded: against another torch that would end in missing symbols, or worse.
if not _same_binary(TORCH_VERSION, torch.__version__):
    raise ImportError(
        f"flashattn_ext was built with torch {TORCH_VERSION}, found torch {torch.__version__}: "
        "reinstall it from a checkout with `pip install setuptools ninja pybind11 && "
        "pip install --no-build-isolation --force-reinstall --no-deps .`"
    )

# The path of the operators, which C++ programs load too.
LIBRARY = str(Path(__file__).with_name("libflashattn_ext.so"))
torch.ops.load_library(LIBRARY)

from . import _C  # noqa: E402
from .interface import (  # noqa: E402
    flash_attn_func,
    forward_kernel,
    scaled_dot_product_attention,
)
from .kvcache import flash_attn_with_kvcache, merge_states  # noqa: E402
from .override import (  # noqa: E402
    disable,
    enable,
    enable_as_environment_says,
    is_enabled,
)
from .varlen import flash_attn_varlen_func  # noqa: E402

__version__ = "0.1.0"
__all__ = [
    "LIBRARY",
    "build_info",
    "disable",
    "enable",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "forward_kernel",
    "is_enabled",
    "merge_states",
    "scaled_dot_product_attention",
]


def __getattr__(name: str):
    # So that `flashattn_ext.transformers.register()` and `flashattn_ext.distributed.register()`
    # need no import of their own, and `import flashattn_ext` imports neither Hugging Face
    # transformers nor the experimental parts of torch.distributed.
    if name in ("distributed", "transformers"):
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def build_info() -> dict:
    """What this build contains.

    version of flashattn_ext; torch and cuda it was built with (cuda is None without); archs of the
    kernels, as in TORCH_CUDA_ARCH_LIST; with_cuda, with_sm90a; compiler; cpu_only_reason, why there
    are no CUDA kernels (None if there are).
    """
    return {**_C.build_info(), "cpu_only_reason": CPU_ONLY_REASON}


enable_as_environment_says()
