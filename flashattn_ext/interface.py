"""The public functions: torch's `scaled_dot_product_attention` and flash-attn's `flash_attn_func`.

Both bring their arguments into the form of `fa::forward` and call it. What the kernels cannot do is
decided in one place, `_unsupported_reason`, and goes to torch's own implementation.
"""

import math
import warnings

import torch
from torch.autograd import forward_ad
from torch.nn.attention.bias import CausalBias, CausalVariant

from . import ops
from ._build import CPU_ONLY_REASON

# Taken at import, so that a program which puts our function in its place does not call itself.
_torch_attention = torch.nn.functional.scaled_dot_product_attention

_MAX_HEAD_DIM = 256

_KERNEL_DTYPES = {
    "cpu": (torch.float16, torch.bfloat16, torch.float32, torch.float64),
    "cuda": (torch.float16, torch.bfloat16),
}

_warned = set()
_device_is_too_old = {}


# torch.compile runs this once while it traces instead of breaking the graph at the warning.
@torch.compiler.assume_constant_result
def _warn_once(name, reason):
    """Says that calls of this kind go to torch: once per reason in the life of the process."""
    if reason not in _warned:
        _warned.add(reason)
        warnings.warn(
            f"flashattn_ext.{name}: no kernel for {reason}; such calls run torch's own "
            "scaled_dot_product_attention (this is said once)",
            stacklevel=3,
        )


@torch.compiler.assume_constant_result
def _below_sm80(device_index):
    """Whether a CUDA device is older than every kernel; asked from the driver once per device."""
    if device_index not in _device_is_too_old:
        _device_is_too_old[device_index] = (
            torch.cuda.is_available() and torch.cuda.get_device_capability(device_index) < (8, 0)
        )
    return _device_is_too_old[device_index]


def _has_tangent(*tensors):
    return any(
        tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None
        for tensor in tensors
    )


# While torch.compile traces, it keeps the stack of transforms as if they ran.
@torch.compiler.assume_constant_result
def _in_functional_derivative():
    """Whether torch.func.grad, vjp or one made of them runs: our derivative is C++, and they refuse
    derivatives in C++."""
    stack = torch._C._functorch.get_interpreter_stack()
    return stack is not None and any(
        level.key() == torch._C._functorch.TransformType.Grad for level in stack
    )


def _wrapped_reason(query, key, value):
    """The part of _unsupported_reason for tensors that are more than a block of memory."""
    for tensor in (query, key, value):
        if tensor.is_nested:
            return "nested tensors"
        if hasattr(type(tensor), "__tensor_flatten__") and type(tensor) not in ops.tensor_types:
            return f"tensors of type {type(tensor).__name__}"
    return None


def _unsupported_reason(query, key, value, attn_mask, dropout_p, device_type):
    """Why our kernels cannot compute a call, as the object of "no kernel for ...", or None.

    It looks at types, dtypes, the device and the last dimension only, never at values, so that it
    can be traced. The texts are few and carry no sizes: each of them is a warning given once. Wrong
    arguments are not a reason; the operator refuses them with a message of its own.
    """
    if query.is_nested or not (type(query) is type(key) is type(value) is torch.Tensor):
        reason = _wrapped_reason(query, key, value)
        if reason is not None:
            return reason
    dtypes = _KERNEL_DTYPES.get(device_type)
    if dtypes is None:
        return f"{device_type} tensors"
    if query.dtype not in dtypes:
        # Others are no dtype of attention: torch has nothing for them either.
        known = query.dtype in _KERNEL_DTYPES["cpu"]
        return f"{query.dtype} on {device_type}" if known else None
    if device_type == "cuda":
        if CPU_ONLY_REASON is not None:
            return f"cuda tensors in a CPU-only build ({CPU_ONLY_REASON})"
        if _below_sm80(query.device.index):
            return "GPUs below compute capability 8.0"
    if dropout_p != 0.0:
        return "dropout_p other than 0"
    head_dim = query.shape[-1]
    if head_dim < 1 or head_dim > _MAX_HEAD_DIM:
        return f"a head_dim outside 1 to {_MAX_HEAD_DIM}"
    if value.shape[-1] != head_dim and key.shape[-1] == head_dim:
        return "a head_dim of value other than that of query"
    if torch.is_grad_enabled():
        if attn_mask is not None and attn_mask.requires_grad:
            return "a mask that requires grad"
        if _in_functional_derivative():
            return "torch.func's derivatives"
    if forward_ad._current_level >= 0 and _has_tangent(query, key, value, attn_mask):
        return "forward-mode derivatives"
    return None


def _in_autocast(device_type):
    return device_type in _KERNEL_DTYPES and torch.is_autocast_enabled(device_type)


def _cast(device_type, *tensors):
    """Casts as torch's autocast does for its own attention: every floating-point tensor of the
    device but float64 ones, an additive mask included."""
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(
        tensor.to(dtype)
        if tensor is not None
        and tensor.is_floating_point()
        and tensor.dtype != torch.float64
        and tensor.device.type == device_type
        else tensor
        for tensor in tensors
    )


def _visible_band(seqlen_q, seqlen_k, left, right, device):
    """Bool (seqlen_q, seqlen_k), true where key j is inside the window of query i counted from the
    bottom-right corner: i + seqlen_k - seqlen_q - left <= j <= i + seqlen_k - seqlen_q + right.
    A side of -1 is unlimited."""
    distance = (
        torch.arange(seqlen_k, device=device)
        - torch.arange(seqlen_q, device=device).unsqueeze(1)
        - (seqlen_k - seqlen_q)
    )
    visible = torch.ones_like(distance, dtype=torch.bool)
    if left >= 0:
        visible = visible & (distance >= -left)
    if right >= 0:
        visible = visible & (distance <= right)
    return visible


def _call_torch(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa):
    """torch's own attention, except for the inputs without heads that make it divide by zero."""
    tensors = (query, key, value)
    if not any(t.is_nested for t in tensors) and any(
        t.dim() > 2 and 0 in t.shape[-3:-2] for t in tensors
    ):
        if enable_gqa:
            if query.size(-3) != 0:
                raise RuntimeError(
                    f"key: heads must divide those of query ({query.size(-3)}), got key "
                    f"{tuple(key.shape)}, value {tuple(value.shape)}"
                )
            key, value = key[..., :0, :, :], value[..., :0, :, :]
        # Empty, with torch's shape, errors and gradient functions.
        return query @ key.transpose(-2, -1) @ value
    only_mask = isinstance(attn_mask, torch.Tensor) and attn_mask.requires_grad
    if only_mask and not any(t.requires_grad for t in tensors):
        # torch's fused kernels save no LSE then, and their backward fails on CUDA (torch 2.11,
        # pytorch/pytorch#148476); its plain one gives the gradient of the mask.
        return torch._scaled_dot_product_attention_math(
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            bool(is_causal),
            scale=scale,
            enable_gqa=bool(enable_gqa),
        )[0]
    return _torch_attention(
        query,
        key,
        value,
        attn_mask=attn_mask,
        dropout_p=dropout_p,
        # While tracing, these may be comparisons of symbolic sizes; torch takes plain ones only.
        is_causal=True if is_causal else False,  # noqa: SIM210
        scale=scale,
        enable_gqa=True if enable_gqa else False,  # noqa: SIM210
    )


def _is_lower_right(bias, query, key):
    """Reads a CausalBias as torch does: one with equal lengths is plain top-left causal."""
    if bias.variant == CausalVariant.UPPER_LEFT or bias.seq_len_q == bias.seq_len_kv:
        return False
    lengths = (query.size(-2), key.size(-2))
    if (bias.seq_len_q, bias.seq_len_kv) != lengths:
        raise RuntimeError(
            f"attn_mask: causal_lower_right must be made for lengths {lengths} of query and key, "
            f"got {(bias.seq_len_q, bias.seq_len_kv)}"
        )
    return True


def _check_heads(query, key, value):
    """Without enable_gqa, heads that differ must be 1: torch then broadcasts them."""
    several = [t.size(-3) for t in (query, key, value) if t.dim() > 2 and t.size(-3) != 1]
    if any(heads != several[0] for heads in several):
        raise RuntimeError(
            "key: heads must equal those of query unless enable_gqa=True; got query "
            f"{tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)} in the "
            "layout (batch, heads, seqlen, head_dim)"
        )


def _forward_any_rank(query, key, value, attn_mask, is_causal, scale, enable_gqa, bottom_right):
    """fa::forward for what is not plainly 4-D: other ranks, and leading dimensions to broadcast.

    All leading dimensions but the heads are folded into batch. Broadcasting is by strides; only
    where leading dimensions cannot be merged by strides does the fold copy, as torch's does.
    """
    rank = max(query.dim(), key.dim(), value.dim())
    if not enable_gqa:
        _check_heads(query, key, value)
    tensors = [t[(None,) * (max(rank, 3) - t.dim())] for t in (query, key, value)]
    try:
        batch = torch.broadcast_shapes(*(t.shape[:-3] for t in tensors))
    except RuntimeError as error:
        raise RuntimeError(
            "query, key and value: batch must be equal or broadcast, got shapes "
            f"{tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}"
        ) from error
    heads = [t.size(-3) for t in tensors]
    if not enable_gqa:
        heads = [torch.broadcast_shapes(*((h,) for h in heads))[0]] * 3
    folded = math.prod(batch)
    query, key, value = (
        t.expand(*batch, h, -1, -1).reshape(folded, h, *t.shape[-2:])
        for t, h in zip(tensors, heads, strict=True)
    )
    if attn_mask is not None and rank > 4 and attn_mask.dim() > 3:
        tail = attn_mask.shape[-3:]
        try:
            attn_mask = attn_mask.expand(*batch, *tail).reshape(folded, *tail)
        except RuntimeError as error:
            raise RuntimeError(
                f"attn_mask: shape must broadcast to {(*batch, heads[0])} and (seqlen_q, seqlen_k),"
                f" got {tuple(attn_mask.shape)}"
            ) from error
    out = ops.forward(query, key, value, attn_mask, is_causal, scale, bottom_right=bottom_right)[0]
    return out.reshape(*(*batch, heads[0])[: rank - 2], *out.shape[-2:])


def check_scale(name, scale):
    # The dispatcher would take the number out of a tensor, and its gradient would be lost.
    if isinstance(scale, torch.Tensor):
        raise TypeError(f"{name}: must be a float, got a tensor")


def scaled_dot_product_attention(
    query,
    key,
    value,
    attn_mask=None,
    dropout_p=0.0,
    is_causal=False,
    scale=None,
    enable_gqa=False,
):
    """Attention `softmax(scale * query @ key^T + attn_mask) @ value` from our own kernels.

    Takes the place of `torch.nn.functional.scaled_dot_product_attention`: same arguments, same
    meaning, same kinds of errors. The algorithm is the blocked online softmax of FlashAttention
    (Dao et al. 2022, 2023): memory grows with the sequence length, not with its square.

    Args:
        query: `(..., heads_q, seqlen_q, head_dim)`; float16 or bfloat16, on CPU also float32 and
            float64. Any strides. Leading dimensions broadcast; two or three dimensions in all are
            taken as torch takes them.
        key: `(..., heads_k, seqlen_k, head_dim)`, dtype and device of query.
        value: `(..., heads_k, seqlen_k, head_dim)`, dtype and device of query.
        attn_mask: broadcasts to `(..., heads_q, seqlen_q, seqlen_k)` and is read by its strides,
            never expanded. bool: true takes part. float32 or the dtype of query: is added to the
            scaled scores. Also `torch.nn.attention.bias.causal_upper_left` and
            `causal_lower_right`.
        dropout_p: probability of dropping a weight; other than 0 is torch's work, see below.
        is_causal: query i sees the keys 0 to i, the top-left corner, also when the lengths differ.
        scale: factor of the scores, of any sign; default `1 / sqrt(head_dim)`.
        enable_gqa: allows heads_k to be a divisor of heads_q; each key and value head then serves
            `heads_q / heads_k` query heads, without being copied.

    Returns:
        Tensor of shape `(..., heads_q, seqlen_q, head_dim)`, in the dtype and, for 4-D input, with
        the strides of `torch.empty_like(query)`. A query that sees no key gives 0. NaN in an input
        that takes part shows in the output; a NaN or infinite value row of a hidden key may, as
        0 times it is NaN.

    Under `torch.autocast` query, key, value and an additive mask are cast first, as torch casts
    them.

    Gradients of query, key and value come from our own kernels too, each with the strides of
    `torch.empty_like` of its tensor; a query that sees no key gets 0. For training query, key,
    value, the mask, the result and its LSE, `(batch, heads_q, seqlen_q)`, are kept; otherwise
    nothing. On the CPU gradients are the same in every run; on CUDA they are with
    `torch.use_deterministic_algorithms(True)`, which costs speed. Gradients of gradients do not
    exist: asking for one raises.

    Calls that the kernels cannot do run torch's own function and return its result; a warning says
    so, once per reason in a process. Reasons: dropout; a mask that requires grad while grad mode is
    on; derivatives by torch.func (grad, vjp, jvp and what is made of them) and in forward mode;
    head_dim above 256; value with another head_dim; float32 and float64 on CUDA; a package built
    without CUDA, or a GPU below compute capability 8.0; devices other than CPU and CUDA; nested
    tensors, and distributed ones before `flashattn_ext.distributed.register()`.

    Raises:
        RuntimeError: attn_mask together with is_causal; heads_k other than heads_q without
            enable_gqa, or not dividing it; shapes, dtypes or devices that do not fit. The message
            names the argument, the rule and the value.
        ValueError: a causal bias together with is_causal.
        TypeError: scale is a tensor.
    """
    ranks = (query.dim(), key.dim(), value.dim())
    if min(ranks) < 2:
        raise RuntimeError(f"query, key, value: must have at least 2 dimensions, got {ranks}")
    check_scale("scale", scale)
    bottom_right = False
    if attn_mask is not None:
        if not isinstance(attn_mask, torch.Tensor) or attn_mask.is_nested:
            # torch's own error, or its own meaning.
            return _call_torch(
                query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
            )
        if isinstance(attn_mask, CausalBias):
            if is_causal:
                raise ValueError("attn_mask: a CausalBias must not be used with is_causal=True")
            bottom_right = _is_lower_right(attn_mask, query, key)
            attn_mask = None
            is_causal = True
        elif is_causal:
            raise RuntimeError(
                "attn_mask: explicit attn_mask should not be set when is_causal=True; got both"
            )
    device_type = query.device.type
    if _in_autocast(device_type):
        query, key, value, attn_mask = _cast(device_type, query, key, value, attn_mask)
    reason = _unsupported_reason(query, key, value, attn_mask, dropout_p, device_type)
    if reason is not None:
        _warn_once("scaled_dot_product_attention", reason)
        if bottom_right:
            attn_mask = _visible_band(query.size(-2), key.size(-2), -1, 0, query.device)
            is_causal = False
        return _call_torch(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if ranks == (4, 4, 4):
        q_shape, k_shape, v_shape = query.shape, key.shape, value.shape
        if (
            q_shape[0] == k_shape[0] == v_shape[0]
            and k_shape[1] == v_shape[1]
            and (enable_gqa or k_shape[1] == q_shape[1] or k_shape[1] == 1)
        ):
            return ops.forward(
                query, key, value, attn_mask, is_causal, scale, bottom_right=bottom_right
            )[0]
    return _forward_any_rank(
        query, key, value, attn_mask, is_causal, scale, enable_gqa, bottom_right
    )


def check_flash_options(dropout_p, window_size, softcap, alibi_slopes):
    if dropout_p != 0.0:
        raise NotImplementedError(
            f"dropout_p: dropout is not supported, got {dropout_p}; pass 0.0, or use "
            "scaled_dot_product_attention, which leaves dropout to torch"
        )
    if softcap != 0.0:
        raise NotImplementedError(
            f"softcap: capped scores are not supported, got {softcap}; pass 0.0"
        )
    if alibi_slopes is not None:
        raise NotImplementedError(
            "alibi_slopes: ALiBi is not supported, got a value; pass None, and give the biases to "
            "scaled_dot_product_attention as attn_mask"
        )
    pair = isinstance(window_size, (tuple, list)) and len(window_size) == 2
    if not pair or not all(isinstance(side, (int, torch.SymInt)) for side in window_size):
        raise RuntimeError(f"window_size: must be two integers (left, right), got {window_size!r}")
    if min(window_size) < -1:
        raise RuntimeError(
            f"window_size: sides must be -1 (unlimited) or at least 0, got {tuple(window_size)}"
        )


def _check_flash_tensors(q, k, v):
    fits = q.dim() == k.dim() == v.dim() == 4
    if fits:
        batch, _, heads_q, head_dim = q.shape
        k_batch, seqlen_k, heads_k, k_head_dim = k.shape
        v_batch, v_seqlen, v_heads, _ = v.shape
        fits = (
            batch == k_batch == v_batch
            and seqlen_k == v_seqlen
            and heads_k == v_heads
            and head_dim == k_head_dim
            and (heads_q == 0 if heads_k == 0 else heads_q % heads_k == 0)
        )
    if not fits:
        raise RuntimeError(
            "q, k, v: must be (batch, seqlen_q, heads_q, head_dim) and twice (batch, seqlen_k, "
            "heads_k, head_dim) with heads_k dividing heads_q; got "
            f"{tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )


def _logsumexp(query, key, visible, scale):
    """LSE in plain torch, (batch, heads_q, seqlen_q), for calls that the kernels do not do."""
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    groups = query.size(1) // max(key.size(1), 1)
    scale = max(query.size(3), 1) ** -0.5 if scale is None else scale
    keys = key.to(dtype).repeat_interleave(groups, 1)
    scores = query.to(dtype) @ keys.transpose(2, 3) * scale
    if visible is not None:
        scores = scores.masked_fill(~visible, -math.inf)
    return scores.logsumexp(3)


def _flash_in_torch(query, key, value, causal, scale, left, right, need_lse):
    """(out, lse or None) of flash_attn_func from torch's own attention, layout (B, H, S, D)."""
    seqlen_q, seqlen_k = query.size(2), key.size(2)
    # On a square the corners agree, and torch needs no mask tensor.
    square_causal = causal and left < 0 and seqlen_q == seqlen_k
    visible = None
    if (causal or left >= 0 or right >= 0) and (need_lse or not square_causal):
        visible = _visible_band(seqlen_q, seqlen_k, left, 0 if causal else right, query.device)
    out = _call_torch(
        query,
        key,
        value,
        None if square_causal else visible,
        0.0,
        square_causal,
        scale,
        query.size(1) != key.size(1),
    )
    if visible is not None:
        # Not every backend of torch gives 0 for a query that sees no key.
        out = out.masked_fill(~visible.any(1, keepdim=True), 0.0)
    if not need_lse:
        return out, None
    with torch.no_grad():
        return out, _logsumexp(query, key, visible, scale)


def flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """Attention with the names, the layout and the causal corner of flash-attn's function.

    Note the layout: sequence before heads. `scaled_dot_product_attention` has heads first.

    Args:
        q: `(batch, seqlen_q, heads_q, head_dim)`; float16 or bfloat16, on CPU also float32 and
            float64. Any strides.
        k: `(batch, seqlen_k, heads_k, head_dim)`; heads_k divides heads_q, so grouped and
            multi-query attention need no copies.
        v: the shape of k.
        dropout_p: must be 0.
        softmax_scale: factor of the scores; default `1 / sqrt(head_dim)`.
        causal: query i sees the keys up to `i + seqlen_k - seqlen_q`: the last query sees all, the
            bottom-right corner.
        window_size: `(left, right)`; query i sees the keys from `i + seqlen_k - seqlen_q - left` to
            `i + seqlen_k - seqlen_q + right`, both included. -1 is unlimited. With causal the
            right side is 0.
        softcap: must be 0.
        alibi_slopes: must be None.
        deterministic: gradients are the same in every run, as results are anyway and gradients on
            the CPU too. Costs speed on CUDA. `torch.use_deterministic_algorithms(True)` does the
            same.
        return_attn_probs: return LSE too.

    Returns:
        out, `(batch, seqlen_q, heads_q, head_dim)` in the dtype and with the strides of
        `torch.empty_like(q)`; or `(out, softmax_lse, None)` with return_attn_probs, where
        softmax_lse is the natural logarithm of the softmax denominators, `(batch, heads_q,
        seqlen_q)`, float32 (float64 for float64 input), without gradient. The place of flash-attn's
        dropout probabilities holds None. A query that sees no key gives 0 and LSE -inf.

    Under `torch.autocast` q, k and v are cast to its dtype. Gradients are as in
    `scaled_dot_product_attention`.

    What the kernels cannot do (see there) runs torch's own attention, with a mask of shape
    (seqlen_q, seqlen_k) where causal or window_size asks for one; a warning says so, once per
    reason.

    Raises:
        NotImplementedError (a RuntimeError): dropout_p, softcap or alibi_slopes is set.
        RuntimeError: shapes, dtypes, devices or window sides that do not fit.
        TypeError: softmax_scale is a tensor.
    """
    check_flash_options(dropout_p, window_size, softcap, alibi_slopes)
    _check_flash_tensors(q, k, v)
    check_scale("softmax_scale", softmax_scale)
    left, right = window_size
    device_type = q.device.type
    if _in_autocast(device_type):
        q, k, v = _cast(device_type, q, k, v)
    query, key, value = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    reason = _unsupported_reason(query, key, value, None, 0.0, device_type)
    if reason is None:
        out, lse = ops.forward(
            query,
            key,
            value,
            None,
            causal,
            softmax_scale,
            window_left=left,
            window_right=right,
            bottom_right=True,
            deterministic=bool(deterministic),
        )
    else:
        _warn_once("flash_attn_func", reason)
        out, lse = _flash_in_torch(
            query, key, value, causal, softmax_scale, left, right, return_attn_probs
        )
    out = out.transpose(1, 2)
    return (out, lse, None) if return_attn_probs else out


def forward_kernel(
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
    """Which kernel `torch.ops.fa.forward` takes for these arguments on this device, and why.

    Args:
        query, key, value, attn_mask, is_causal, scale, window_left, window_right, bottom_right:
            those of the operator: 4-D tensors `(batch, heads, seqlen, head_dim)`.

    Returns:
        A string such as "fwd_sm90 192x64: sm_90, rows that the bulk copy engine can take",
        "fwd_sm80 128x64: scale is not positive" or "decode 16x128, 4 splits in a cluster: few
        queries": the kernel, the query rows of a tile and the keys of a block, for the decoding
        kernels also the splits of the keys, and the reason. On CUDA "none: no query or no key"
        where there is nothing to do; on the CPU always "cpu: query is on the CPU". Nothing is
        launched. For tensors with memory: not for tracing.

    Raises:
        RuntimeError: whatever the operator refuses.
    """
    return torch.ops.fa.forward_kernel(
        query,
        key,
        value,
        attn_mask,
        is_causal,
        scale,
        window_left=window_left,
        window_right=window_right,
        bottom_right=bottom_right,
    )
