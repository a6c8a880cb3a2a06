"""The dispatcher side of the package: what the operators need from Python for tracing, vmap and
torch's flop counter.

The schemas, the CPU and CUDA kernels and the derivative are C++ and are registered when the library
is loaded. Shape and dtype rules stand there only (csrc/ops/checks.h); nothing here repeats them.
Nothing here is public.
"""

import math

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils.flop_counter import register_flop_formula

# The overload itself: one dictionary look-up and one overload resolution less than
# torch.ops.fa.forward on every call.
forward = torch.ops.fa.forward.default
backward = torch.ops.fa.backward.default

# Tensor subclasses that the operators take: DTensor, once it has our rules (distributed.py).
tensor_types = set()


def _check_devices(query, **others):
    """Beside one meta tensor, the dispatcher sends real ones to the fake kernels too."""
    for name, tensor in others.items():
        if tensor is not None and tensor.device != query.device:
            raise RuntimeError(
                f"{name}: device must equal that of query ({query.device}), got {tensor.device}"
            )


@torch.library.register_fake("fa::forward")
def _forward_fake(
    query,
    key,
    value,
    attn_mask=None,
    is_causal=False,
    scale=None,
    *,
    window_left=-1,
    window_right=-1,
    bottom_right=False,
    deterministic=False,
):
    """Metadata of (out, lse): out is laid out as query, lse is (batch, heads_q, seqlen_q)."""
    _check_devices(query, key=key, value=value, attn_mask=attn_mask)
    lse_dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    return torch.empty_like(query), query.new_empty(query.shape[:3], dtype=lse_dtype)


@torch.library.register_fake("fa::backward")
def _backward_fake(
    grad_out,
    query,
    key,
    value,
    out,
    lse,
    attn_mask=None,
    is_causal=False,
    scale=None,
    *,
    window_left=-1,
    window_right=-1,
    bottom_right=False,
    deterministic=False,
):
    """Metadata of the gradients: each is laid out as its tensor, whatever grad_out looks like."""
    _check_devices(
        query, grad_out=grad_out, key=key, value=value, out=out, lse=lse, attn_mask=attn_mask
    )
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _to_front(mapped, tensor, dim):
    """The mapped dimension first; a tensor without one is expanded."""
    if dim is None:
        return tensor.expand(mapped, *tensor.shape)
    return tensor.movedim(dim, 0)


def _fold_mask(mapped, batch, attn_mask, dim):
    """The mask of a call whose batch is `mapped * batch`."""
    if attn_mask is None or (dim is None and attn_mask.dim() < 4):
        return attn_mask
    attn_mask = _to_front(mapped, attn_mask, dim)
    missing = 5 - attn_mask.dim()  # leading dimensions that the caller left to broadcasting
    attn_mask = attn_mask.reshape(mapped, *(1,) * missing, *attn_mask.shape[1:])
    return attn_mask.expand(-1, batch, -1, -1, -1).flatten(0, 1)


# The vmap rules fold the mapped dimension into batch; a tensor that is not mapped is expanded, not
# copied, unless its batch dimension cannot be merged with the mapped one by strides alone.


@torch.library.register_vmap("fa::forward")
def _forward_vmap(info, in_dims, query, key, value, attn_mask=None, *options, **keywords):
    mapped = info.batch_size
    tensors = [
        _to_front(mapped, *pair) for pair in zip((query, key, value), in_dims[:3], strict=True)
    ]
    batch = tensors[0].size(1)
    mask_dim = in_dims[3] if len(in_dims) > 3 else None
    attn_mask = _fold_mask(mapped, batch, attn_mask, mask_dim)
    folded = (t.flatten(0, 1) for t in tensors)
    results = forward(*folded, attn_mask, *options, **keywords)
    return tuple(t.unflatten(0, (mapped, batch)) for t in results), (0, 0)


@torch.library.register_vmap("fa::backward")
def _backward_vmap(
    info, in_dims, grad_out, query, key, value, out, lse, attn_mask=None, *options, **keywords
):
    mapped = info.batch_size
    tensors = (grad_out, query, key, value, out, lse)
    tensors = [_to_front(mapped, *pair) for pair in zip(tensors, in_dims[:6], strict=True)]
    batch = tensors[1].size(1)
    mask_dim = in_dims[6] if len(in_dims) > 6 else None
    attn_mask = _fold_mask(mapped, batch, attn_mask, mask_dim)
    folded = (t.flatten(0, 1) for t in tensors)
    gradients = backward(*folded, attn_mask, *options, **keywords)
    return tuple(t.unflatten(0, (mapped, batch)) for t in gradients), (0, 0, 0)


# Floating-point operations by torch's rules for its own attention: every pair of a query and a key
# counts, also one that a mask, causal or a window hides, and a key head counts once for each query
# head that it serves. A formula gets shapes in place of tensors.


def _product_flops(query, seqlen_k):
    """One product of every query with every key: a multiplication and an addition per element."""
    return 2 * math.prod(query) * seqlen_k


@register_flop_formula(torch.ops.fa.forward)
def _forward_flops(query, key, *args, **kwargs):
    """S = Q K^T and O = P V."""
    return 2 * _product_flops(query, key[2])


@register_flop_formula(torch.ops.fa.backward)
def _backward_flops(grad_out, query, key, *args, **kwargs):
    """S again, dP, and a product for each of dQ, dK and dV."""
    return 5 * _product_flops(query, key[2])


@register_flop_formula(torch.ops.fa.forward_kvcache)
def _forward_kvcache_flops(
    query, key_cache, value_cache, seqlens_k=None, block_table=None, *args, **kwargs
):
    """As forward, over all slots of a sequence, filled or not: the lengths are on the device."""
    slots = key_cache[1] if block_table is None else key_cache[1] * block_table[1]
    return 2 * _product_flops(query, slots)


def _packed_product_flops(query, key, cu_seqlens_q, cu_seqlens_k, seqused_k):
    """One product of every query with every key of its sequence. Where the lengths are not to be
    had, sequences of equal lengths count."""
    total_q, heads, head_dim = query.shape
    lengths = [cu_seqlens_q, cu_seqlens_k, seqused_k]
    if any(isinstance(x, (FakeTensor, FunctionalTensor)) or x.is_meta for x in lengths[:2]):
        sequences = max(cu_seqlens_q.shape[0] - 1, 1)
        return _product_flops((heads, total_q, head_dim), key.shape[0]) // sequences
    keys = cu_seqlens_k.diff() if seqused_k is None else seqused_k
    return _product_flops((heads, head_dim), int((cu_seqlens_q.diff().long() * keys).sum()))


@register_flop_formula(torch.ops.fa.forward_varlen, get_raw=True)
def _forward_varlen_flops(
    query, key, value, cu_seqlens_q, cu_seqlens_k, *args, seqused_k=None, **kwargs
):
    """As forward, sequence by sequence."""
    return 2 * _packed_product_flops(query, key, cu_seqlens_q, cu_seqlens_k, seqused_k)


@register_flop_formula(torch.ops.fa.backward_varlen, get_raw=True)
def _backward_varlen_flops(
    grad_out, query, key, value, out, lse, cu_seqlens_q, cu_seqlens_k, *args, seqused_k=None, **kw
):
    """As backward, sequence by sequence."""
    return 5 * _packed_product_flops(query, key, cu_seqlens_q, cu_seqlens_k, seqused_k)
