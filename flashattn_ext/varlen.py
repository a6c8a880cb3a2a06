"""Packed sequences: attention of sequences of several lengths, one behind the other in tensors
without a batch dimension. flash-attn's `flash_attn_varlen_func`.
"""

import itertools

import torch

from . import interface, ops

forward_varlen = torch.ops.fa.forward_varlen.default
backward_varlen = torch.ops.fa.backward_varlen.default


@torch.library.register_fake("fa::forward_varlen")
def _forward_varlen_fake(
    query,
    key,
    value,
    cu_seqlens_q,
    cu_seqlens_k,
    is_causal=False,
    scale=None,
    *,
    window_left=-1,
    window_right=-1,
    seqused_k=None,
    deterministic=False,
):
    """Metadata of (out, lse): out is laid out as query, lse is (heads_q, total_q)."""
    ops._check_devices(
        query,
        key=key,
        value=value,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seqused_k=seqused_k,
    )
    total_q, heads_q, _ = query.shape
    lse_dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    return torch.empty_like(query), query.new_empty((heads_q, total_q), dtype=lse_dtype)


@torch.library.register_fake("fa::backward_varlen")
def _backward_varlen_fake(
    grad_out,
    query,
    key,
    value,
    out,
    lse,
    cu_seqlens_q,
    cu_seqlens_k,
    is_causal=False,
    scale=None,
    *,
    window_left=-1,
    window_right=-1,
    seqused_k=None,
    deterministic=False,
):
    """Metadata of the gradients: each is laid out as its tensor, whatever grad_out looks like."""
    ops._check_devices(
        query,
        grad_out=grad_out,
        key=key,
        value=value,
        out=out,
        lse=lse,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seqused_k=seqused_k,
    )
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _starts(name, cu_seqlens, tensor_name, rows):
    """The starts of the sequences as numbers, checked as the operator does on the CPU."""
    starts = cu_seqlens.tolist()
    for i, (before, start) in enumerate(itertools.pairwise([0, *starts])):
        if not before <= start <= rows:
            raise RuntimeError(
                f"{name}: must ascend from 0 to at most the {rows} rows of {tensor_name}, got "
                f"{start} after {before} at {i}"
            )
    return starts


def _in_torch(q, k, v, cu_seqlens_q, cu_seqlens_k, causal, scale, left, right, seqused_k, need_lse):
    """(out, lse or None) from torch's own attention, one sequence after the other. Reads the
    lengths, for which the host waits."""
    fits = q.dim() == k.dim() == v.dim() == 3 and k.shape[:2] == v.shape[:2]
    if not fits or k.size(2) != q.size(2) or (q.size(1) % k.size(1) if k.size(1) else q.size(1)):
        raise RuntimeError(
            "q, k, v: must be (total_q, heads_q, head_dim) and twice (total_k, heads_k, head_dim) "
            f"with heads_k dividing heads_q; got {tuple(q.shape)}, {tuple(k.shape)} and "
            f"{tuple(v.shape)}"
        )
    lengths = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "seqused_k": seqused_k}
    for name, tensor in lengths.items():
        if tensor is None and name == "seqused_k":
            continue
        count = cu_seqlens_q.numel() - (name == "seqused_k")
        if tensor.dtype != torch.int32 or tensor.shape != (count,) or cu_seqlens_q.numel() == 0:
            raise RuntimeError(
                f"{name}: must be int32 of shape ({max(count, 1)},), got {tensor.dtype} of "
                f"{tuple(tensor.shape)}"
            )
    starts_q = _starts("cu_seqlens_q", cu_seqlens_q, "q", q.size(0))
    starts_k = _starts("cu_seqlens_k", cu_seqlens_k, "k", k.size(0))
    used = None if seqused_k is None else seqused_k.tolist()
    for b, keys in enumerate(used or ()):
        rows = starts_k[b + 1] - starts_k[b]
        if not 0 <= keys <= rows:
            raise RuntimeError(
                f"seqused_k: must be 0 to the keys of the sequence ({rows}), got {keys} for "
                f"sequence {b}"
            )
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    lse = q.new_full((q.size(1), q.size(0)), -torch.inf, dtype=lse_dtype) if need_lse else None

    def zeros(rows):
        return q.new_zeros((rows, q.size(1), v.size(2)))

    outs = [zeros(starts_q[0])]
    for b, (begin, end) in enumerate(itertools.pairwise(starts_q)):
        keys = slice(starts_k[b], starts_k[b + 1] if used is None else starts_k[b] + used[b])
        if begin == end or keys.start == keys.stop:
            outs.append(zeros(end - begin))
            continue
        query, key, value = (
            x.transpose(0, 1).unsqueeze(0) for x in (q[begin:end], k[keys], v[keys])
        )
        out_b, lse_b = interface._flash_in_torch(
            query, key, value, causal, scale, left, right, need_lse
        )
        outs.append(out_b.squeeze(0).transpose(0, 1))
        if need_lse:
            lse[:, begin:end] = lse_b.squeeze(0)
    outs.append(zeros(q.size(0) - starts_q[-1]))
    out = torch.cat(outs)
    if out.shape == q.shape:
        out = torch.empty_like(q).copy_(out)  # for its strides
    return out, lse


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q=None,
    max_seqlen_k=None,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
    *,
    seqused_k=None,
):
    """Attention of packed sequences, with the names and the meaning of flash-attn's function.

    Sequences of several lengths lie one behind the other, and each attends to itself alone: no row
    is spent on padding, and nothing in one sequence, NaN included, reaches another. Nothing is read
    from the device, so that a call can be captured in a CUDA graph and replayed with other lengths
    in the same tensors.

    Args:
        q: `(total_q, heads_q, head_dim)`; float16 or bfloat16, on CPU also float32 and float64. Any
            strides.
        k: `(total_k, heads_k, head_dim)`; heads_k divides heads_q.
        v: the shape of k.
        cu_seqlens_q: int32 `(sequences + 1,)`, ascending: the rows of sequence i are
            `cu_seqlens_q[i]` up to, not including, `cu_seqlens_q[i + 1]`. Empty sequences are fine.
            Rows of no sequence, before the first or behind the last, are padding: they give 0. On
            CUDA nobody checks the numbers: those that lead out of q are clamped, and where they
            descend results are undefined. On the CPU they raise.
        cu_seqlens_k: the same for k and v.
        max_seqlen_q, max_seqlen_k: without meaning here, as no kernel needs them.
        dropout_p: must be 0.
        softmax_scale: factor of the scores; default `1 / sqrt(head_dim)`.
        causal: query i of a sequence sees its keys up to `i + seqlen_k - seqlen_q`: the last query
            sees all, the bottom-right corner.
        window_size: `(left, right)`; query i sees the keys from `i + seqlen_k - seqlen_q - left` to
            `i + seqlen_k - seqlen_q + right`, both included. -1 is unlimited. With causal the
            right side is 0.
        softcap: must be 0.
        alibi_slopes: must be None.
        deterministic: gradients are the same in every run, as in `flash_attn_func`.
        return_attn_probs: return LSE too.
        block_table: must be None; keys in pages are for `flash_attn_with_kvcache`.
        seqused_k: int32 `(sequences,)`: only so many of the first keys of each sequence take part,
            and count in seqlen_k. The others may be anything and get gradient 0.

    Returns:
        out, `(total_q, heads_q, head_dim)` in the dtype and with the strides of
        `torch.empty_like(q)`; or `(out, softmax_lse, None)` with return_attn_probs, where
        softmax_lse is the natural logarithm of the softmax denominators, `(heads_q, total_q)`,
        float32 (float64 for float64 input), without gradient. A query that sees no key gives 0 and
        LSE -inf.

    Under `torch.autocast` q, k and v are cast to its dtype. Gradients are as in
    `scaled_dot_product_attention`. What the kernels cannot do (see there) runs torch's own
    attention, one sequence after the other, for which the host waits for the lengths; a warning
    says so, once per reason.

    Raises:
        NotImplementedError (a RuntimeError): dropout_p, softcap, alibi_slopes or block_table is
            set.
        RuntimeError: shapes, dtypes, devices, lengths or window sides that do not fit. The message
            has the operator's names: query for q, key for k, value for v.
        TypeError: softmax_scale is a tensor.
    """
    interface.check_flash_options(dropout_p, window_size, softcap, alibi_slopes)
    interface.check_scale("softmax_scale", softmax_scale)
    if block_table is not None:
        raise NotImplementedError(
            "block_table: keys in pages are not supported, got a tensor; use "
            "flash_attn_with_kvcache"
        )
    left, right = window_size
    device_type = q.device.type
    if interface._in_autocast(device_type):
        q, k, v = interface._cast(device_type, q, k, v)
    reason = interface._unsupported_reason(q, k, v, None, 0.0, device_type)
    if reason is None:
        out, lse = forward_varlen(
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            causal,
            softmax_scale,
            window_left=left,
            window_right=right,
            seqused_k=seqused_k,
            deterministic=bool(deterministic),
        )
    else:
        interface._warn_once("flash_attn_varlen_func", reason)
        out, lse = _in_torch(
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            causal,
            softmax_scale,
            left,
            right,
            seqused_k,
            return_attn_probs,
        )
    return (out, lse, None) if return_attn_probs else out
