"""Builds the kernels of the ladder, and binds every rung to the inputs of its log."""

from __future__ import annotations

import ctypes
import math
import os
import shlex
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from ladder_rungs import HOPPER, PORTABLE, SDPA, Log
from torch import Tensor
from workload import Inputs

ROOT = Path(__file__).resolve().parent.parent
SOURCES = [Path(__file__).resolve().parent / "ladder" / f"log{name}.cu" for name in ("000", "002")]


class Problem(ctypes.Structure):
    """fa::ladder::Problem of benchmarks/ladder/rung.cuh."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "key", "value", "out")),
        ("strides", ctypes.c_int64 * 12),  # batch, head, row of query, key, value, out
        *((name, ctypes.c_int) for name in ("batch", "heads_q", "heads_k", "seqlen")),
        ("scale", ctypes.c_float),
        ("scale_log2", ctypes.c_float),
    )

    @classmethod
    def of(cls, x: Inputs, out: Tensor) -> Problem:
        tensors = (x.query, x.key, x.value, out)
        assert all(t.is_contiguous() and t.dtype == torch.float16 for t in tensors)
        batch, heads_q, seqlen, head_dim = x.query.shape
        assert head_dim == 128
        strides = [t.stride(dim) for t in tensors for dim in range(3)]
        return cls(
            *(t.data_ptr() for t in tensors),
            (ctypes.c_int64 * 12)(*strides),
            batch,
            heads_q,
            x.key.shape[1],
            seqlen,
            head_dim**-0.5,
            head_dim**-0.5 / math.log(2),
        )


class Facts(ctypes.Structure):
    """fa::ladder::Facts of benchmarks/ladder/rung.cuh."""

    FIELDS = ("registers", "smem_bytes", "local_bytes", "ctas_per_sm")
    _fields_ = tuple((name, ctypes.c_int) for name in FIELDS)


def build(verbose: bool = False) -> ctypes.CDLL:
    """Compiles what has changed, for the GPU at hand; without one, for TORCH_CUDA_ARCH_LIST, by
    default 9.0."""
    from torch.utils.cpp_extension import load

    if not torch.cuda.is_available():
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "9.0")
    flags = shlex.split((ROOT / "csrc/nvcc_flags.txt").read_text(), comments=True)
    path = load(
        "flashattn_ext_ladder",
        [str(source) for source in SOURCES],
        extra_cuda_cflags=flags,
        with_cuda=True,
        is_python_module=False,
        verbose=verbose,
    )
    return ctypes.CDLL(path)


def launch(library: ctypes.CDLL, log: str, rung: str, problem: Problem) -> None:
    """On torch's current stream."""
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    function = getattr(library, f"log{log}_launch")
    if status := function(rung.encode(), ctypes.byref(problem), stream):
        raise RuntimeError(f"log {log}, {rung}: CUDA error {status}")


def describe(library: ctypes.CDLL, log: str, rung: str) -> dict[str, int]:
    """What the rung's kernel takes: registers and bytes of local memory of a thread, shared memory
    of a CTA, CTAs that an SM holds."""
    facts = Facts()
    if status := getattr(library, f"log{log}_describe")(rung.encode(), ctypes.byref(facts)):
        raise RuntimeError(f"log {log}, {rung}: CUDA error {status}")
    return {name: getattr(facts, name) for name in Facts.FIELDS}


def bind(library: ctypes.CDLL, log: Log, rung: str, x: Inputs) -> Callable[[], Tensor]:
    """A call that computes the rung on these inputs, which it keeps. RuntimeError where the rung
    cannot run."""
    causal = log.problem.mask == "causal"
    if rung == SDPA:
        gqa = log.problem.heads_q != log.problem.heads_k
        return lambda: F.scaled_dot_product_attention(
            x.query, x.key, x.value, is_causal=causal, enable_gqa=gqa
        )
    if rung in (PORTABLE, HOPPER):
        # The Hopper kernel takes positive scales only; the portable one makes them positive by
        # changing the signs of the query.
        portable = rung == PORTABLE
        query = -x.query if portable else x.query
        scale = (-1 if portable else 1) * log.problem.head_dim**-0.5
        arguments = (query, x.key, x.value, None, causal, scale)
        kernel = torch.ops.fa.forward_kernel(*arguments)
        if not kernel.startswith("fwd_sm80" if portable else "fwd_sm90"):
            raise RuntimeError(f"{rung}: the call would take {kernel}")
        forward = torch.ops.fa.forward.default
        return lambda: forward(*arguments)[0]
    out = torch.full_like(x.query, float("nan"))  # what is left unwritten shows
    problem = Problem.of(x, out)

    def call() -> Tensor:
        launch(library, log.name, rung, problem)
        return out

    call.inputs = x
    return call
