"""Inputs for the tests of derivatives, and a record of the calls of fa::backward."""

import torch
from calls import qkv
from torch.utils._python_dispatch import TorchDispatchMode

forward = torch.ops.fa.forward.default
backward = torch.ops.fa.backward.default


def inputs(device, dtype=torch.float16, *, q=(2, 4, 9, 16), k=(2, 2, 13, 16)):
    return [t.requires_grad_() for t in qkv(device, dtype, q=q, k=k)]


def plain(tensors):
    return [t.detach().clone().requires_grad_() for t in tensors]


def saved_of(*tensors, **options):
    """A call of the op with its result and what fa::backward takes."""
    out, lse = forward(*tensors, **options)
    return torch.randn_like(out), *tensors[:3], out, lse, *tensors[3:]


class Calls(TorchDispatchMode):
    """The calls of fa::backward that reach a kernel, by their keyword arguments."""

    def __enter__(self):
        self.calls = []
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is backward:
            self.calls.append(kwargs)
        return func(*args, **(kwargs or {}))
