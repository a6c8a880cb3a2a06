"""Builds flashattn_ext: the only place that knows the sources and the compiler flags.

Environment: FA_CPU_ONLY=1 leaves the CUDA backend out; TORCH_CUDA_ARCH_LIST, MAX_JOBS and CUDA_HOME
mean what they mean for every torch extension. A GPU is never asked for.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pybind11
import torch
from setuptools import setup
from torch.utils.cpp_extension import (
    CUDA_HOME,
    BuildExtension,
    CppExtension,
    CUDAExtension,
    get_cxx_compiler,
)

ROOT = Path(__file__).resolve().parent
LIBRARY = "flashattn_ext.libflashattn_ext"
DEFAULT_ARCHS = "8.0+PTX;9.0a"  # the PTX carries every newer GPU
GIB_PER_JOB = 1  # a compiler takes 0.6 GiB on the headers of torch, 0.3 GiB on a kernel file


def why_cpu_only() -> str | None:
    """The reason to leave the CUDA backend out, or None to build it."""
    if os.environ.get("FA_CPU_ONLY", "0") not in ("", "0"):
        return "FA_CPU_ONLY is set"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    nvcc = Path(CUDA_HOME or "/nonexistent", "bin", "nvcc")
    if not nvcc.is_file():
        return f"no nvcc found (CUDA_HOME is {CUDA_HOME})"
    for header in ("cuda_runtime_api.h", "cublas_v2.h", "cusparse.h", "cusolverDn.h"):  # for ATen
        if not Path(CUDA_HOME, "include", header).is_file():
            return f"the CUDA toolkit in {CUDA_HOME} has no {header}"
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    release = re.search(r"release (\d+)\.(\d+)", version).group(0).split()[1]
    if release.split(".")[0] != torch.version.cuda.split(".")[0]:
        return f"{nvcc} is CUDA {release}, torch {torch.__version__} needs {torch.version.cuda}"
    return None


def arch_list() -> str:
    """TORCH_CUDA_ARCH_LIST with our default; torch turns it into -gencode flags."""
    archs = (os.environ.get("TORCH_CUDA_ARCH_LIST") or DEFAULT_ARCHS).strip().replace(" ", ";")
    os.environ["TORCH_CUDA_ARCH_LIST"] = archs
    for arch in archs.split(";"):
        version = re.fullmatch(r"(\d+\.\d+)[af]?(\+PTX)?", arch)
        if version is None or float(version.group(1)) < 8.0:
            raise SystemExit(
                "TORCH_CUDA_ARCH_LIST: must be versions from 8.0 on, such as "
                f"{DEFAULT_ARCHS!r}, got {archs!r}"
            )
    # A GPU of 9.0 could load either binary, and in that of 9.0 the Hopper kernels are empty.
    if {"9.0", "9.0a"} <= gpus_of(archs):
        raise SystemExit(
            "TORCH_CUDA_ARCH_LIST: must not have both 9.0 and 9.0a, which are binaries for the "
            f"same GPUs, got {archs!r}"
        )
    return archs


def gpus_of(archs: str) -> set[str]:
    return {arch.removesuffix("+PTX") for arch in archs.split(";")}


def job_count() -> int:
    """Parallel compilers that fit the usable cores and the free memory."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    free_kib = re.search(r"MemAvailable:\s+(\d+)", read("/proc/meminfo"))
    limit = read("/sys/fs/cgroup/memory.max").strip()  # "max" or bytes, inside a container
    free = [int(free_kib.group(1)) << 10] if free_kib else []
    free += [int(limit)] if limit.isdigit() else []
    return max(1, min([cores] + [size // (GIB_PER_JOB << 30) for size in free]))


def read(path: str) -> str:
    return Path(path).read_text() if Path(path).is_file() else ""


def with_sm90a(reason: str | None) -> bool:
    """Whether the Hopper kernels, csrc/kernels/*_sm90.cu, are built: wgmma is not in plain 9.0."""
    return reason is None and "9.0a" in gpus_of(arch_list())


def extensions(reason: str | None) -> list:
    """The operators, a library that needs no Python, and the module _C, which says what is in it;
    with `reason` they have the CPU backend only."""
    host_files = ("library", "autograd", "cpu", "cpu_backward", "kvcache", "override", "varlen")
    sources = [f"csrc/ops/{name}.cpp" for name in host_files]
    macros = [("FA_VERSION", f'"{VERSION}"'), ("FA_WITH_CUDA", int(reason is None))]
    macros += [("FA_CUDA_ARCHS", '""' if reason else f'"{arch_list()}"')]
    hopper = with_sm90a(reason)
    macros += [("FA_WITH_SM90A", int(hopper))]
    flags = {"cxx": ["-O3", "-g0", "-fvisibility=hidden"]}
    link_flags = []
    if sys.platform == "linux":
        # Turns on at::parallel_for. What GCC calls is in the runtime that torch has loaded: not
        # linking another avoids a second thread pool. Clang calls a runtime of its own.
        flags["cxx"] += ["-fopenmp"]
        link_flags += ["-fopenmp"] if "clang" in get_cxx_compiler() else []
    make = CppExtension
    if reason is None:
        make = CUDAExtension
        cuda_files = ("cuda", "cuda_backward", "kvcache_cuda", "varlen_cuda")
        sources += [f"csrc/ops/{name}.cpp" for name in cuda_files]
        kernels = sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("csrc/kernels/*.cu"))
        # Each for every arch, as torch has one set of flags for all files: for 8.0+PTX the Hopper
        # kernels are empty, and take 5 s and 70 KB.
        sources += [kernel for kernel in kernels if hopper or not kernel.endswith("_sm90.cu")]
        # torch switches the half operators off for every .cu file; ours see no torch.
        halves = ["HALF_OPERATORS", "HALF_CONVERSIONS", "HALF2_OPERATORS", "BFLOAT16_CONVERSIONS"]
        flags["nvcc"] = [f"-U__CUDA_NO_{name}__" for name in halves]
        flags["nvcc"] += shlex.split(read(str(ROOT / "csrc/nvcc_flags.txt")), comments=True)
    options = {
        "include_dirs": [pybind11.get_include(), str(ROOT / "csrc")],
        "define_macros": macros,
        "extra_compile_args": flags,
        "extra_link_args": link_flags,
    }
    return [
        # The limited API, which no file uses: otherwise torch would link it with Python.
        make(LIBRARY, sources, py_limited_api=True, **options),
        make("flashattn_ext._C", ["csrc/ops/python.cpp"], **options),
    ]


class Build(BuildExtension):
    """Also writes flashattn_ext/_build.py, which __init__.py reads before it loads anything."""

    def run(self) -> None:
        super().run()
        folder = Path(self.get_ext_fullpath("flashattn_ext._C")).parent
        text = f"TORCH_VERSION = {str(torch.__version__)!r}\nCPU_ONLY_REASON = {REASON!r}\n"
        (folder / "_build.py").write_text(text)

    def get_ext_filename(self, ext_name: str) -> str:
        if LIBRARY.endswith(ext_name):  # no module of Python's: a plain name
            return ext_name.replace(".", os.sep) + ".so"
        return super().get_ext_filename(ext_name)


if shutil.which(get_cxx_compiler()) is None:
    raise SystemExit(f"flashattn_ext: no C++ compiler found ({get_cxx_compiler()}; set CXX)")
VERSION = re.search(r'__version__ = "(.+)"', read(str(ROOT / "flashattn_ext/__init__.py"))).group(1)
REASON = why_cpu_only()
os.environ.setdefault("MAX_JOBS", str(job_count()))
backends = f"CPU only ({REASON})" if REASON else f"CPU and CUDA for {arch_list()}"
print(
    f"flashattn_ext: building {backends}, with_sm90a {with_sm90a(REASON)}, "
    f"torch {torch.__version__}",
    flush=True,
)
setup(
    version=VERSION,
    ext_modules=extensions(REASON),
    cmdclass={"build_ext": Build},
    # The binary fits the torch it was built with: the same minor version.
    install_requires=[f"torch=={'.'.join(torch.__version__.split('.')[:2])}.*"],
)
