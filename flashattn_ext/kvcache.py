"""Decoding: attention of a few new queries over the keys and values of a cache, and the merging of
attention over parts of the keys. flash-attn's `flash_attn_with_kvcache`, and `merge_states`.
"""

import torch

from . import ops
from .interface import check_scale

forward_kvcache = torch.ops.fa.forward_kvcache.default


@torch.library.register_fake("fa::forward_kvcache")
def _forward_kvcache_fake(
    query,
    key_cache,
    value_cache,
    seqlens_k=None,
    block_table=None,
    new_key=None,
    new_value=None,
    is_causal=False,
    scale=None,
    *,
    window_left=-1,
    window_right=-1,
    num_splits=0,
    batch_invariant=False,
):
    """Metadata of (out, lse): out is contiguous, lse is (batch, heads_q, seqlen_q)."""
    ops._check_devices(
        query,
        key_cache=key_cache,
        value_cache=value_cache,
        seqlens_k=seqlens_k,
        block_table=block_table,
        new_key=new_key,
        new_value=new_value,
    )
    batch, seqlen_q, heads_q, _ = query.shape
    lse_dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    return (
        query.new_empty(query.shape),
        query.new_empty((batch, heads_q, seqlen_q), dtype=lse_dtype),
    )


def _refuse(name, value, what):
    raise NotImplementedError(f"{name}: {what}, got {value}")


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    block_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    rotary_interleaved=True,
    alibi_slopes=None,
    num_splits=0,
    return_softmax_lse=False,
    *,
    batch_invariant=False,
):
    """Attention over a KV cache, with the names and the meaning of flash-attn's function.

    New keys and values, if any, are written to the cache in place, behind those that are there;
    then the queries attend to all of them. Nothing is read from the device, so that calls can be
    captured in a CUDA graph and replayed with other lengths, pages and numbers in the same tensors.

    Args:
        q: `(batch, seqlen_q, heads_q, head_dim)`; float16 or bfloat16, on CPU also float32 and
            float64; head_dim up to 256.
        k_cache: `(batch_cache, capacity, heads_k, head_dim)`; with block_table `(pages, page_size,
            heads_k, head_dim)`. heads_k divides heads_q. Any strides but in the last dimension,
            which is contiguous; head_dim a multiple of 8 and 16-byte aligned rows are much faster
            on CUDA.
        v_cache: the shape of k_cache.
        k: new keys `(batch, seqlen_new, heads_k, head_dim)`, in the dtype of q. Needs v and
            cache_seqlens. They are written without their gradient. k_cache and v_cache must then be
            different memory, and q, k and v lie outside of it; of what several sequences write to
            the same row, through block_table or cache_batch_idx, any may stay.
        v: the shape of k.
        rotary_cos, rotary_sin: must be None; rotate q and k before the call.
        cache_seqlens: how many keys of the cache count, without k: an integer, or an int32 tensor
            `(batch,)`; by default all of them. What lies behind them may be anything, NaN included.
            On CUDA nobody checks that they fit: those below 0 or above the capacity are clamped,
            and new keys past the end are dropped.
        cache_batch_idx: int32 `(batch,)`, the row of the cache that each sequence has; distinct
            where keys are appended.
        cache_leftpad: must be None.
        block_table: int32 `(batch, pages of a sequence)`, which pages the keys of a sequence lie
            in, in order. Entries behind its length and before its window may be anything.
            page_size is a power of two from 16 on.
        softmax_scale: factor of the scores; default `1 / sqrt(head_dim)`.
        causal: the last query sees all keys, the one before one key less, and so on.
        window_size: `(left, right)`: query i sees the keys from `i + keys - seqlen_q - left` to
            `i + keys - seqlen_q + right`. -1 is unlimited. With causal the right side is 0.
        softcap: must be 0.
        rotary_interleaved: without meaning, as nothing is rotated.
        alibi_slopes: must be None.
        num_splits: into how many parts the keys are cut on CUDA; more than 128 count as 128; 0
            chooses from the shapes.
        return_softmax_lse: return LSE too.
        batch_invariant: on CUDA, the result of a sequence has the same bits whatever else is in the
            batch, and however large the batch is, as long as the capacity and seqlen_q are the
            same; costs some speed with large batches. Excludes num_splits.

    Returns:
        out, `(batch, seqlen_q, heads_q, head_dim)`, contiguous; with return_softmax_lse `(out,
        softmax_lse)`, where softmax_lse `(batch, heads_q, seqlen_q)` is the natural logarithm of
        the softmax denominators in float32 (float64 for float64 input). A query that sees no key
        gives 0 and LSE -inf. Not differentiable: backward raises.

    Raises:
        NotImplementedError (a RuntimeError): rotary, leftpad, softcap or alibi_slopes is set.
        RuntimeError: arguments that do not fit. The message has the operator's names: key_cache
            for k_cache, new_key for k, seqlens_k for cache_seqlens, window_left for window_size,
            block_table for cache_batch_idx.
        TypeError: softmax_scale is a tensor.

    Unlike the other functions it does not cast under `torch.autocast`.
    """
    check_scale("softmax_scale", softmax_scale)
    for name, rotary in (("rotary_cos", rotary_cos), ("rotary_sin", rotary_sin)):
        if rotary is not None:
            _refuse(name, "a tensor", "must be None; rotate q and k before the call")
    if cache_leftpad is not None:
        _refuse("cache_leftpad", "a tensor", "must be None")
    if softcap != 0.0:
        _refuse("softcap", softcap, "must be 0.0")
    if alibi_slopes is not None:
        _refuse("alibi_slopes", "a tensor", "must be None")
    pair = isinstance(window_size, (tuple, list)) and len(window_size) == 2
    if not pair or not all(isinstance(side, (int, torch.SymInt)) for side in window_size):
        raise RuntimeError(f"window_size: must be two integers (left, right), got {window_size!r}")
    if q.dim() != 4:
        raise RuntimeError(
            "query: must have 4 dimensions (batch, seqlen_q, heads, head_dim), got "
            f"{q.dim()}: {tuple(q.shape)}"
        )
    if isinstance(cache_seqlens, (int, torch.SymInt)):
        if isinstance(cache_seqlens, int) and not 0 <= cache_seqlens < 2**31:
            raise RuntimeError(f"seqlens_k: must be 0 to 2**31 - 1, got {cache_seqlens}")
        cache_seqlens = torch.full((q.shape[0],), cache_seqlens, dtype=torch.int32, device=q.device)
    if cache_batch_idx is not None:
        if block_table is not None:
            raise RuntimeError("cache_batch_idx: must be None with block_table, got both")
        if not isinstance(cache_batch_idx, torch.Tensor):
            raise RuntimeError(f"cache_batch_idx: must be a tensor, got {cache_batch_idx!r}")
        if cache_batch_idx.dim() != 1 or cache_batch_idx.shape[0] != q.shape[0]:
            raise RuntimeError(
                f"cache_batch_idx: must have shape (batch,) with batch {q.shape[0]}, got "
                f"{tuple(cache_batch_idx.shape)}"
            )
        if cache_batch_idx.dtype != torch.int32:
            raise RuntimeError(f"cache_batch_idx: dtype must be int32, got {cache_batch_idx.dtype}")
        block_table = cache_batch_idx.unsqueeze(1)  # a sequence is one page
    out, lse = forward_kvcache(
        q,
        k_cache,
        v_cache,
        cache_seqlens,
        block_table,
        k,
        v,
        causal,
        softmax_scale,
        window_left=window_size[0],
        window_right=window_size[1],
        num_splits=num_splits,
        batch_invariant=batch_invariant,
    )
    return (out, lse) if return_softmax_lse else out


def merge_states(out_a, lse_a, out_b, lse_b):
    """Attention over all keys from attention over two parts of them: exact, up to rounding.

    With it a prefix that many requests share, say, is attended to once: results over the prefix and
    over the rest merge to those over both. Merging is associative, so any number of parts is merged
    two by two. Plain operators: any device, differentiable in all arguments. The LSE that this
    package returns is not, so training through it is refused.

    Args:
        out_a, out_b: `(batch, seqlen_q, heads_q, head_dim)`, results over different keys, as from
            `flash_attn_func` and `flash_attn_with_kvcache`; or `(total_q, heads_q, head_dim)`, as
            from `flash_attn_varlen_func`.
        lse_a, lse_b: `(batch, heads_q, seqlen_q)` or `(heads_q, total_q)`, their LSEs (natural
            logarithm). A part with LSE -inf has no keys and weighs nothing, whatever its out holds.

    Returns:
        (out, lse) over both parts, in the shapes of the arguments and the dtypes of out_a and
        lse_a. Where neither part has keys, out is 0 and lse -inf.

    Raises:
        RuntimeError: shapes that do not fit; an out that requires grad beside an lse that does not.
    """
    for name, out in (("out_a", out_a), ("out_b", out_b)):
        if out.dim() not in (3, 4):
            raise RuntimeError(
                f"{name}: must have 4 dimensions (batch, seqlen_q, heads, head_dim) or, packed, 3, "
                f"got {out.dim()}: {tuple(out.shape)}"
            )
    out, lse = torch.ops.fa.merge_states(
        out_a.transpose(-3, -2), lse_a, out_b.transpose(-3, -2), lse_b
    )
    return out.transpose(-3, -2), lse
