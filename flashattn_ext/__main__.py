"""`python -m flashattn_ext`: a report to paste into a bug report.

Owns what the report says: the build, the machine, and for typical calls which kernels take them and
why, and their time beside that of torch's attention. What fails is reported in place of its result;
nothing raises.
"""

import argparse
import faulthandler
import platform
import shutil
import statistics
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

import flashattn_ext

_SECONDS_OF_TIMING = 4.0  # all calls together


class _Call(NamedTuple):
    """An attention to report on; tensors are (batch, heads, seqlen, head_dim)."""

    name: str
    heads: tuple[int, int] = (16, 16)  # of query, of key
    seqlens: tuple[int, int] = (2048, 2048)
    head_dim: int = 128
    is_causal: bool = False
    masked: bool = False  # bool, the last quarter of the keys hidden
    trains: bool = False  # gradients are computed and timed too


_CALLS = (
    _Call("prefill"),
    _Call("causal with shared keys", heads=(32, 8), is_causal=True),
    _Call("padding mask", masked=True),
    _Call("decode", heads=(32, 8), seqlens=(1, 8192)),
    _Call("head_dim 96", head_dim=96, is_causal=True),
    _Call("head_dim 256", heads=(8, 8), head_dim=256, is_causal=True),
    _Call("training", is_causal=True, trains=True),
)


def _small(call):
    """The same call in a size for the CPU."""
    heads_q, heads_k = call.heads
    seqlens = tuple(-(-seqlen // 16) for seqlen in call.seqlens)
    return call._replace(heads=(heads_q // 8, heads_k // 8), seqlens=seqlens)


def _line_of(error):
    first, _, _ = str(error).strip().partition("\n")
    return f"error: {type(error).__name__}: {first}"


def _or_error(function, *arguments):
    """The result, or what was raised instead, in one line."""
    try:
        return function(*arguments)
    except Exception as error:
        return _line_of(error)


def _write(name, text, indent=2):
    # Flushed, so that a crash of the process does not take the lines before it along.
    print(f"{' ' * indent}{name:<20}{text}", flush=True)


def _report_build():
    print("build")
    for name, value in flashattn_ext.build_info().items():
        _write(name, " ".join(value) or None if isinstance(value, list) else value)
    _write("installed in", Path(flashattn_ext.__file__).parent)
    _write("enabled", flashattn_ext.is_enabled())


def _driver():
    program = shutil.which("nvidia-smi")
    if program is None:
        return "no nvidia-smi found"
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=5)
    return (result.stdout or result.stderr).strip().partition("\n")[0]


def _gpu(index):
    properties = torch.cuda.get_device_properties(index)
    return (
        f"{properties.name}, compute capability {properties.major}.{properties.minor}, "
        f"{properties.multi_processor_count} SMs, {properties.total_memory / 2**30:.1f} GiB"
    )


def _cuda_state():
    torch.cuda.init()  # says why there is none
    return f"{torch.cuda.device_count()} found"


def _report_machine():
    print("machine")
    _write("python", platform.python_version())
    _write("platform", platform.platform())
    _write("CPU threads", torch.get_num_threads())
    _write("torch", torch.__version__)
    _write("CUDA of torch", torch.version.cuda)
    _write("cuDNN of torch", _or_error(torch.backends.cudnn.version))
    _write("driver", _or_error(_driver))
    _write("GPUs", _or_error(_cuda_state))
    for index in range(torch.cuda.device_count()):
        _write(f"GPU {index}", _or_error(_gpu, index))


def _inputs(call, device, dtype):
    """query, key, value, the mask or None."""
    shapes = [(1, call.heads[i], call.seqlens[i], call.head_dim) for i in (0, 1, 1)]
    tensors = [
        torch.randn(shape, device=device, dtype=dtype, requires_grad=call.trains)
        for shape in shapes
    ]
    if not call.masked:
        return *tensors, None
    mask = torch.ones(1, 1, 1, call.seqlens[1], dtype=torch.bool, device=device)
    mask[..., -(call.seqlens[1] // 4) :] = False
    return *tensors, mask


def _forward_kernel(call, query, key, value, mask):
    return torch.ops.fa.forward_kernel(query, key, value, mask, call.is_causal)


def _backward_kernel(call, query, key, value, mask):
    out = torch.empty_like(query)
    lse = torch.empty(query.shape[:3], device=query.device)
    return torch.ops.fa.backward_kernel(out, query, key, value, out, lse, mask, call.is_causal)


def _results(call, attention, query, key, value):
    """out, and with gradients those of query, key and value for a gradient of ones."""
    out = attention()
    if not call.trains:
        return (out,)
    return out, *torch.autograd.grad(out, (query, key, value), torch.ones_like(out))


def _milliseconds(function, device, seconds):
    """Median time of a call in rounds of calls without a pause, for about this many seconds."""

    def of_a_round(calls):
        start = time.perf_counter()
        for _ in range(calls):
            function()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    end = time.perf_counter() + seconds
    of_a_round(1)  # what happens once: loading the kernel, choosing it
    calls = max(1, min(100, int(seconds / 10 / max(of_a_round(1), 1e-6))))
    times = [of_a_round(calls)]
    while time.perf_counter() < end:
        times.append(of_a_round(calls))
    return statistics.median(times) / calls * 1e3


def _speed(call, device, seconds, query, key, value, mask):
    def ours():
        return torch.ops.fa.forward(query, key, value, mask, call.is_causal)[0]

    def torchs():
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=call.is_causal,
            enable_gqa=call.heads[0] != call.heads[1],
        )

    tensors = (query, key, value)
    pairs = zip(*(_results(call, attention, *tensors) for attention in (ours, torchs)), strict=True)
    difference = torch.stack([(a.double() - b.double()).abs().max() for a, b in pairs]).max()
    our_ms, torch_ms = (
        _milliseconds(lambda a=attention: _results(call, a, *tensors), device, seconds / 2)
        for attention in (ours, torchs)
    )
    return (
        f"{our_ms:.3f} ms, torch {torch_ms:.3f} ms, ratio {torch_ms / our_ms:.2f}; "
        f"largest difference {difference.item():.1e}"
    )


def _report_call(call, device, dtype, seconds):
    heads_q, heads_k = call.heads
    seqlen_q, seqlen_k = call.seqlens
    causal = ", causal" if call.is_causal else ""
    print(
        f"  {call.name}: heads {heads_q}/{heads_k}, seqlens {seqlen_q}/{seqlen_k}, "
        f"head_dim {call.head_dim}{causal}",
        flush=True,
    )
    try:
        inputs = _inputs(call, device, dtype)
    except Exception as error:
        _write("inputs", _line_of(error), 4)
        return
    _write("forward", _or_error(_forward_kernel, call, *inputs), 4)
    _write("backward", _or_error(_backward_kernel, call, *inputs), 4)
    name = "time with backward" if call.trains else "time"
    _write(name, _or_error(_speed, call, device, seconds, *inputs), 4)


def main(arguments=None):
    """Prints the report.

    Args:
        arguments: as on the command line; by default those of the process.
    """
    parser = argparse.ArgumentParser(
        prog="python -m flashattn_ext",
        description="Prints what a bug report should say: build, machine, kernels, times.",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where it works")
    device = parser.parse_args(arguments).device
    if device is None:
        works = torch.cuda.is_available() and flashattn_ext.build_info()["with_cuda"]
        device = "cuda" if works else "cpu"
    _report_build()
    _report_machine()
    flashattn_ext.disable()  # the times are to be those of torch's own kernels
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    calls = _CALLS if device == "cuda" else [_small(call) for call in _CALLS]
    print(f"calls on {device}, {dtype}, batch 1")
    for call in calls:
        _report_call(call, device, dtype, _SECONDS_OF_TIMING / len(calls))


if __name__ == "__main__":
    faulthandler.enable()  # a crash then names the line that made the call
    main()
