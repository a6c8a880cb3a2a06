"""Inputs and checks for the tests of the public functions."""

import contextlib
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from reference import attention_low, attention_ref, error_bound
from torch.utils._python_dispatch import TorchDispatchMode

torch_sdpa = F.scaled_dot_product_attention


def randn(*shape, device="cpu", dtype=torch.float16):
    return torch.randn(shape, device=device, dtype=dtype)


def qkv(device, dtype=torch.float16, *, q=(2, 4, 9, 16), k=(2, 4, 13, 16), v=None):
    return [randn(*shape, device=device, dtype=dtype) for shape in (q, k, v or k)]


def assert_close(out, query, key, value, attn_mask=None, **options):
    """out against the float64 definition, in the layout (batch, heads, seqlen, head_dim)."""
    reference = attention_ref(query, key, value, attn_mask, **options)
    low = attention_low(query, key, value, attn_mask, **options)
    error = (out.double() - reference.out).abs()
    bound = error_bound(reference, low, out.dtype)
    assert out.dtype == query.dtype
    assert (error <= bound).all(), f"error {error.max():.3e}, accepted {bound.min():.3e}"


class OperatorLog(TorchDispatchMode):
    """The operators that reach the dispatcher below autograd."""

    def __enter__(self):
        self.operators = []
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operators.append(func)
        return func(*args, **(kwargs or {}))

    def ran_ours(self):
        return torch.ops.fa.forward.default in self.operators


@contextlib.contextmanager
def warns_once(match):
    """The block gives exactly one warning of ours, and it says this."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    ours = [str(w.message) for w in caught if "flashattn_ext" in str(w.message)]
    assert len(ours) == 1 and match in ours[0], ours
    # It points at the caller, here a test.
    files = [Path(w.filename).name for w in caught if "flashattn_ext" in str(w.message)]
    assert all(name.startswith("test_") for name in files), files


@contextlib.contextmanager
def silent():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
