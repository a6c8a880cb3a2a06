"""torch's fused attention operators as the tests of enable() call them, and which kernels ran."""

import collections
import contextlib

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import flashattn_ext

aten = torch.ops.aten

# The operators of torch whose causal corner is the bottom-right one.
BOTTOM_RIGHT = ("_scaled_dot_product_flash_attention", "_flash_attention_forward")
MASKED = ("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_efficient_attention")
FOR_CPU = "_scaled_dot_product_flash_attention_for_cpu"
OPERATORS = (*BOTTOM_RIGHT, *MASKED, FOR_CPU)


def backward_name(name):
    return "_flash_attention_backward" if name == "_flash_attention_forward" else f"{name}_backward"


def operator(name):
    return getattr(aten, name).default


def call(name, query, key, value, mask=None, *, dropout_p=0.0, is_causal=False, scale=None, **more):
    """The operator's results, for tensors (batch, heads, seqlen, head_dim)."""
    op = operator(name)
    if name == "_scaled_dot_product_flash_attention":
        return op(query, key, value, dropout_p, is_causal, scale=scale, **more)
    if name == "_flash_attention_forward":
        q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
        lengths = (query.shape[2], key.shape[2])
        more = {"return_debug_mask": False} | more
        return op(q, k, v, None, None, *lengths, dropout_p, is_causal, scale=scale, **more)
    if name == FOR_CPU:
        return op(query, key, value, dropout_p, is_causal, attn_mask=mask, scale=scale, **more)
    return op(query, key, value, mask, True, dropout_p, is_causal, scale=scale, **more)


def out_of(name, results):
    """The first result as (batch, heads, seqlen, head_dim)."""
    return results[0].transpose(1, 2) if name == "_flash_attention_forward" else results[0]


def lse_of(results, seqlen_q):
    """The second one as (batch, heads, seqlen)."""
    lse = results[1]
    return lse.squeeze(-1) if lse.dim() == 4 else lse[..., :seqlen_q]


class Stock:
    """Stand-ins on the CPU for torch's kernels on CUDA: they return what the meta functions say,
    full of sevens, and count their calls."""

    def __init__(self, names):
        self.calls = collections.Counter()
        self.library = torch.library.Library("aten", "IMPL", "CPU")
        for name in names:
            for each in (name, backward_name(name)):
                self.library.impl(each, self._stand_in(each))

    def _stand_in(self, name):
        op = operator(name)

        def run(*args, **options):
            self.calls[name] += 1
            to = [tuple(x) if isinstance(x, list) else x for x in map(_to_meta, args)]
            results = op(*to, **{key: _to_meta(x) for key, x in options.items()})
            return tuple(_full(result) for result in results)

        return run


def _to_meta(x):
    return x.to("meta") if isinstance(x, torch.Tensor) else x


def _full(x):
    if not isinstance(x, torch.Tensor):
        return x
    return torch.full_like(x, 7, device="cpu")


@contextlib.contextmanager
def overridden(name, device):
    """The operator `name` runs our kernels on this device. Gives the stand-ins for torch's kernels,
    or None where torch has its own."""
    if device == "cuda":
        if name == FOR_CPU:
            pytest.skip("an operator for CPUs")
        with flashattn_ext.enable("cuda"):
            yield None
        return
    stock = None if name == FOR_CPU else Stock([name])
    override = torch.classes.fa.Override("CPU", [name])
    try:
        yield stock
    finally:
        override.remove()
        if stock is not None:
            stock.library._destroy()


def kernels_of(function):
    """How often a call of function ran fa::forward and fa::backward."""
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        function()
    names = collections.Counter(event.name for event in profiler.events())
    return names["fa::forward"], names["fa::backward"]
