"""Attention by its definition in high precision, and how far from it a result may be.

The definition, with every score in memory:

    S = scale * Q K^T + mask,  -inf where the band or the mask hides the key
    O = softmax(S) V           0 in rows that see no key
    LSE = log sum exp(S)       natural logarithm, -inf in rows that see no key

attention_ref computes it in float64; attention_low computes it as plain code in the dtype of the
inputs would, with every intermediate tensor rounded to that dtype. The error of attention_low is
the yardstick for ours: see error_bound.
"""

import math
from dataclasses import dataclass

import torch

# Above this many scores, (batch, head) pairs are computed one at a time.
MAX_SCORES = 2**24


@dataclass
class Reference:
    out: torch.Tensor  # [batch, heads_q, seqlen_q, head_dim], float64
    lse: torch.Tensor  # [batch, heads_q, seqlen_q], float64
    magnitude: torch.Tensor  # softmax(S) |V|, shaped like out: what rounding errors scale with
    score_size: torch.Tensor  # max |scale| |Q| |K|^T over the visible keys, [b, heads_q, seqlen_q]


def visible_band(
    seqlen_q, seqlen_k, *, is_causal, window_left, window_right, bottom_right, device="cpu"
):
    """Bool [seqlen_q, seqlen_k]: the keys that causality and window leave visible."""
    if is_causal:
        window_right = 0 if window_right < 0 else min(window_right, 0)
    row = torch.arange(seqlen_q, device=device)[:, None]
    if bottom_right:
        row = row + seqlen_k - seqlen_q
    column = torch.arange(seqlen_k, device=device)[None, :]
    visible = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    # Further than this is no limit, and it keeps the sums below from overflowing.
    furthest = seqlen_q + seqlen_k
    if window_left >= 0:
        visible &= column >= row - min(window_left, furthest)
    if window_right >= 0:
        visible &= column <= row + min(window_right, furthest)
    return visible


def _chunks(query, key, attn_mask):
    """Slices of the batch and the heads that keep the scores of a chunk within MAX_SCORES."""
    batch, heads_q, seqlen_q, _ = query.shape
    heads_k, seqlen_k = key.shape[1:3]
    if attn_mask is not None:
        attn_mask = attn_mask.expand(batch, heads_q, seqlen_q, seqlen_k)
    if batch * heads_q * seqlen_q * seqlen_k <= MAX_SCORES:
        yield slice(None), slice(None), slice(None), attn_mask
        return
    group = heads_q // heads_k
    for b in range(batch):
        for h in range(heads_q):
            mask = None if attn_mask is None else attn_mask[b : b + 1, h : h + 1]
            h_k = h // group
            yield slice(b, b + 1), slice(h, h + 1), slice(h_k, h_k + 1), mask


def attention_ref(
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
    """Reference in float64, on the device of the inputs. Arguments as in fa::forward."""
    seqlen_q, head_dim = query.shape[2:]
    seqlen_k = key.shape[2]
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    band = visible_band(
        seqlen_q,
        seqlen_k,
        is_causal=is_causal,
        window_left=window_left,
        window_right=window_right,
        bottom_right=bottom_right,
        device=query.device,
    )
    options = {"dtype": torch.float64, "device": query.device}
    result = Reference(
        torch.empty(query.shape, **options),
        torch.empty(query.shape[:3], **options),
        torch.empty(query.shape, **options),
        torch.empty(query.shape[:3], **options),
    )
    if result.out.numel() == 0:
        return result
    accumulator = torch.promote_types(query.dtype, torch.float32)
    for b, h, h_k, mask in _chunks(query, key, attn_mask):
        q, k, v = query[b, h].double(), key[b, h_k].double(), value[b, h_k].double()
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = (q @ k.mT) * scale
        sizes = (q.abs().float() @ k.abs().mT.float()) * abs(scale)
        visible = band
        if mask is not None and mask.dtype == torch.bool:
            visible = band & mask
        elif mask is not None:
            visible = band & (mask != -torch.inf)
            # Scores are defined in the precision they are accumulated in: beside -1e9, say, they
            # lose their last digits, and the row becomes a plain mean.
            scores = (scores + mask.double()).to(accumulator).double()
        scores = scores.masked_fill(~visible, -torch.inf)
        sees_a_key = visible.any(dim=-1)
        weights = scores.softmax(dim=-1)
        result.out[b, h] = (weights @ v).where(sees_a_key[..., None], 0)
        result.lse[b, h] = torch.logsumexp(scores, dim=-1)
        result.magnitude[b, h] = (weights.float() @ v.abs().float()).where(sees_a_key[..., None], 0)
        result.score_size[b, h] = sizes.where(visible, 0).amax(dim=-1) if seqlen_k else 0
    return result


def attention_low(
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
    """The output of plain code in the dtype of the inputs, with scores and weights rounded to it.

    Products of half-precision matrices accumulate in float32, as in torch. NaN in rows that see no
    key, or where scores overflow, is left as it comes.
    """
    seqlen_q, head_dim = query.shape[2:]
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    dtype = query.dtype
    accumulator = torch.promote_types(dtype, torch.float32)
    band = visible_band(
        seqlen_q,
        key.shape[2],
        is_causal=is_causal,
        window_left=window_left,
        window_right=window_right,
        bottom_right=bottom_right,
        device=query.device,
    )
    out = torch.empty(query.shape, dtype=dtype, device=query.device)
    if out.numel() == 0:
        return out

    def rounded(x):
        return x.to(dtype).to(accumulator)

    for b, h, h_k, mask in _chunks(query, key, attn_mask):
        q, k, v = (x.to(accumulator) for x in (query[b, h], key[b, h_k], value[b, h_k]))
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = rounded(rounded(q @ k.mT) * scale)
        hidden = ~band
        if mask is not None and mask.dtype == torch.bool:
            hidden = hidden | ~mask
        elif mask is not None:
            # A float32 mask promotes the sum to float32.
            scores = scores + mask
            scores = rounded(scores) if mask.dtype == dtype else scores
        scores = scores.masked_fill(hidden, -torch.inf)
        out[b, h] = (rounded(scores.softmax(dim=-1)) @ v).to(dtype)
    return out


def ulp(x, dtype):
    """The distance between neighbouring numbers of dtype at the magnitude of x, in float64."""
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(x.abs().clamp(min=info.tiny, max=info.max))
    return info.eps * torch.exp2((exponent - 1).double())


def error_bound(reference, low, dtype):
    """The largest accepted |out - reference.out|, element by element.

    Twice the error of plain code in the same row, and 2 ulp: one for the rounding of the softmax
    weights, which no kernel with half-precision products can avoid, and one for the rest. The ulp
    is taken at softmax(S) |V|, which the errors of the weights are multiplied with, also where the
    terms of an output cancel. The last part is the rounding of the scores in the accumulator, which
    a row of few keys cannot average out: a sum of head_dim products is off by about
    sqrt(head_dim) eps of their size, more where they are alike. For float16 and bfloat16 it is far
    below an ulp unless scores reach thousands.
    """
    error = (low.double() - reference.out).abs().nan_to_num(nan=0.0, posinf=0.0)
    accumulator = torch.promote_types(dtype, torch.float32)
    eps = (4 + reference.out.shape[-1] ** 0.5) * torch.finfo(accumulator).eps
    # In float64 the reference has the same rounding errors as the result.
    eps, ulps = (2 * eps, 8) if dtype == torch.float64 else (eps, 2)
    score_rounding = eps * reference.score_size[..., None]
    return (
        2 * error.amax(dim=-1, keepdim=True)
        + ulps * ulp(reference.magnitude, dtype)
        + score_rounding * reference.magnitude
    )


def normalised_difference(x, y):
    """|x - y|^2 / (|x|^2 + |y|^2), which is 0 for equal tensors and 1 for unrelated ones."""
    total = float(x.square().sum() + y.square().sum())
    return float((x - y).square().sum()) / total if total else 0.0


def _first(wrong):
    return tuple(int(i) for i in wrong.nonzero()[0])


def assert_close_to_reference(out, lse, reference, low, case_id):
    """Checks one result of fa::forward against attention_ref and attention_low of its inputs.

    out: NaN and infinities in the same places; elsewhere |out - reference| within error_bound, and
    the normalised difference below 1e-5, or twice that of plain code where that is more (scores so
    large, or values so small, that the dtype has no digits left). lse: within 1e-3 + 1e-5 |lse|
    (float64: 1e-10 of either).
    """
    dtype = out.dtype
    for name, ours, expected in (
        ("out", out.double(), reference.out),
        ("lse", lse.double(), reference.lse),
    ):
        assert ours.shape == expected.shape, f"{case_id}: {name} has shape {tuple(ours.shape)}"
        if ours.numel() == 0:
            return
        expected_special = expected.to(out.dtype if name == "out" else lse.dtype).double()
        special = ~expected_special.isfinite() | ~ours.isfinite()
        same = (ours == expected_special) | (ours.isnan() & expected_special.isnan())
        wrong = special & ~same
        if wrong.any():
            at = _first(wrong)
            raise AssertionError(
                f"{case_id}: {name}{list(at)} is {ours[at].item()}, the reference is "
                f"{expected[at].item()}; {int(wrong.sum())} of {wrong.numel()} such elements"
            )
        if name == "out":
            bound = error_bound(reference, low, dtype)
        elif lse.dtype == torch.float64:
            bound = 1e-10 * (1 + expected.abs())
        else:
            bound = 1e-3 + 1e-5 * expected.abs()
        error = (ours - expected).abs().where(~special, 0)
        excess = error - bound.where(~special, 1)
        if (excess > 0).any():
            at = tuple(int(i) for i in torch.unravel_index(excess.argmax(), excess.shape))
            plain = f", plain {dtype} gives {low[at].item()}" if name == "out" else ""
            raise AssertionError(
                f"{case_id}: {name}{list(at)} is {ours[at].item()}, the reference is "
                f"{expected[at].item()}{plain}: off by {error[at].item():.3e}, accepted is "
                f"{bound[at].item():.3e}; {int((excess > 0).sum())} of {excess.numel()} elements "
                f"are off, the largest error is {error.max().item():.3e}"
            )
    # Where terms cancel, one element may be off by more than that; many together are not.
    finite = reference.out.isfinite() & low.isfinite()
    if int(finite.sum()) >= 256:
        expected = reference.out[finite]
        difference = normalised_difference(out[finite].double(), expected)
        accepted = max(1e-5, 2 * normalised_difference(low[finite].double(), expected))
        assert difference <= accepted, f"{case_id}: normalised difference {difference:.3e}"


def forward(query, key, value, attn_mask=None, **options):
    """fa::forward with NaN in the memory that it is likely to get: none of it may show."""
    # Blocks of the sizes of the outputs, two each in case one is taken for something else, and
    # large blocks that an allocator cuts others from.
    stale = [torch.full_like(query, torch.nan) for _ in range(2)]
    stale += [torch.full(query.shape[:3], torch.nan, device=query.device) for _ in range(2)]
    stale += [torch.full((2**18,), torch.nan, device=query.device) for _ in range(4)]
    del stale
    return torch.ops.fa.forward(query, key, value, attn_mask, **options)


def check(query, key, value, attn_mask=None, *, case_id=None, **options):
    """Runs fa::forward, compares with the reference, and returns out and lse."""
    out, lse = forward(query, key, value, attn_mask, **options)
    if case_id is None:
        shapes = [tuple(x.shape) for x in (query, key, attn_mask) if x is not None]
        case_id = f"{query.device.type} {query.dtype} {shapes} {options}"
    lse_dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    assert (out.dtype, lse.dtype) == (query.dtype, lse_dtype), f"{case_id}: {out.dtype} {lse.dtype}"
    assert out.stride() == torch.empty_like(query).stride(), f"{case_id}: strides {out.stride()}"
    assert lse.is_contiguous(), f"{case_id}: lse has strides {lse.stride()}"
    arguments = (query, key, value, attn_mask)
    reference = attention_ref(*arguments, **options)
    assert_close_to_reference(out, lse, reference, attention_low(*arguments, **options), case_id)
    return out, lse


def close(a, b, dtype):
    """Asserts that two results, both right within rounding in dtype, are alike. Where one of them
    is wrong, check shows it; here whole rows or heads would be exchanged."""
    tolerance = (4 if dtype in (torch.float16, torch.bfloat16) else 256) * torch.finfo(dtype).eps
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
