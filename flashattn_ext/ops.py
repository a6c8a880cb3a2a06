"""The dispatcher side of the package: what `fa::forward` needs from Python for tracing and vmap.

The schema and the CPU and CUDA kernels are C++ and are registered when `_C` is loaded. Shape and
dtype rules stand there only (csrc/ops/checks.h); nothing here repeats them. Nothing here is public.
"""

import torch

from . import _C  # noqa: F401  (loading it defines fa::forward)

# The overload itself: one dictionary look-up and one overload resolution less than
# torch.ops.fa.forward on every call.
forward = torch.ops.fa.forward.default


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
):
    """Metadata of (out, lse): out is laid out as query, lse is (batch, heads_q, seqlen_q)."""
    for name, tensor in (("key", key), ("value", value), ("attn_mask", attn_mask)):
        # Beside one meta tensor, the dispatcher sends real ones here too.
        if tensor is not None and tensor.device != query.device:
            raise RuntimeError(
                f"{name}: device must equal that of query ({query.device}), got {tensor.device}"
            )
    lse_dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    return torch.empty_like(query), query.new_empty(query.shape[:3], dtype=lse_dtype)


@torch.library.register_vmap("fa::forward")
def _forward_vmap(
    info,
    in_dims,
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
):
    """Folds the mapped dimension into batch; a tensor that is not mapped is expanded, not copied,
    unless its batch dimension cannot be merged with the mapped one by strides alone."""
    mapped = info.batch_size

    def to_front(tensor, dim):
        if dim is None:
            return tensor.expand(mapped, *tensor.shape)
        return tensor.movedim(dim, 0)

    query, key, value = map(to_front, (query, key, value), in_dims[:3])
    batch = query.size(1)
    if attn_mask is not None and (in_dims[3] is not None or attn_mask.dim() == 4):
        attn_mask = to_front(attn_mask, in_dims[3])
        missing = 5 - attn_mask.dim()  # leading dimensions that the caller left to broadcasting
        attn_mask = attn_mask.reshape(mapped, *(1,) * missing, *attn_mask.shape[1:])
        attn_mask = attn_mask.expand(-1, batch, -1, -1, -1).flatten(0, 1)
    out, lse = forward(
        query.flatten(0, 1),
        key.flatten(0, 1),
        value.flatten(0, 1),
        attn_mask,
        is_causal,
        scale,
        window_left=window_left,
        window_right=window_right,
        bottom_right=bottom_right,
    )
    return (out.unflatten(0, (mapped, batch)), lse.unflatten(0, (mapped, batch))), (0, 0)
