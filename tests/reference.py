"""Attention by its definition in high precision, and how far from it a result may be.

The definition, with every score in memory:

    S = scale * Q K^T + mask,  -inf where the band or the mask hides the key
    O = softmax(S) V           0 in rows that see no key
    LSE = log sum exp(S)       natural logarithm, -inf in rows that see no key

and of its gradients, P being softmax(S) or 0 where a key is hidden and dO the gradient of O:

    dV = P^T dO    dS = P (dO V^T - rowsum(P (dO V^T)))    dQ = scale dS K    dK = scale dS^T Q

attention_ref and gradients_ref compute it in float64; attention_low and gradients_low compute it as
plain code in the dtype of the inputs would, with every intermediate tensor rounded to that dtype.
The error of plain code is the yardstick for ours: see error_bound and gradient_bounds.
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


def _visible_and_scores(query, key, mask, band, scale):
    """Of a chunk in float64: which keys are visible, and the scores with the mask added."""
    scores = (query.double() @ key.double().mT) * scale
    visible = band
    if mask is not None and mask.dtype == torch.bool:
        visible = band & mask
    elif mask is not None:
        visible = band & (mask != -torch.inf)
        # Scores are defined in the precision they are accumulated in: beside -1e9, say, they
        # lose their last digits, and the row becomes a plain mean.
        accumulator = torch.promote_types(query.dtype, torch.float32)
        scores = (scores + mask.double()).to(accumulator).double()
    return visible, scores.masked_fill(~visible, -torch.inf)


def _low_scores(query, key, mask, band, scale, dtype):
    """Of a chunk: the scores of plain code. query and key are in the accumulator's dtype."""
    scores = _rounded(_rounded(query @ key.mT, dtype) * scale, dtype)
    hidden = ~band
    if mask is not None and mask.dtype == torch.bool:
        hidden = hidden | ~mask
    elif mask is not None:
        # A float32 mask promotes the sum to float32.
        scores = scores + mask
        scores = _rounded(scores, dtype) if mask.dtype == dtype else scores
    return scores.masked_fill(hidden, -torch.inf)


def _rounded(x, dtype):
    """x as dtype holds it, in the dtype that products accumulate in."""
    return x.to(dtype).to(torch.promote_types(dtype, torch.float32))


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
    for b, h, h_k, mask in _chunks(query, key, attn_mask):
        q, k, v = query[b, h], key[b, h_k], value[b, h_k].double()
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        sizes = (q.abs().float() @ k.abs().mT.float()) * abs(scale)
        visible, scores = _visible_and_scores(q, k, mask, band, scale)
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

    for b, h, h_k, mask in _chunks(query, key, attn_mask):
        q, k, v = (x.to(accumulator) for x in (query[b, h], key[b, h_k], value[b, h_k]))
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = _low_scores(q, k, mask, band, scale, dtype)
        out[b, h] = (_rounded(scores.softmax(dim=-1), dtype) @ v).to(dtype)
    return out


NAMES = ("query", "key", "value")


@dataclass
class GradientReference:
    """Each a list for query, key and value, in float64 and shaped like them."""

    gradients: list
    # What the rounding of weights scales with: the sums that give the gradients, of sizes.
    magnitudes: list
    # What rounding in the accumulator scales with.
    accumulated: list
    # What the rounding of O scales with, from which kernels take the row sum of dS.
    output: list


def _gradient_options(query, key, is_causal, scale, window_left, window_right, bottom_right):
    band = visible_band(
        query.shape[2],
        key.shape[2],
        is_causal=is_causal,
        window_left=window_left,
        window_right=window_right,
        bottom_right=bottom_right,
        device=query.device,
    )
    return band, 1 / math.sqrt(query.shape[3]) if scale is None else scale


def _sum_of_groups(x, heads_k):
    """Sums what the query heads of each key head give it."""
    return x.unflatten(1, (heads_k, -1)).sum(2)


def gradients_ref(
    grad_out,
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
    """GradientReference in float64, on the device of the inputs. Arguments as in fa::forward."""
    band, scale = _gradient_options(
        query, key, is_causal, scale, window_left, window_right, bottom_right
    )
    parts = [
        [torch.zeros(x.shape, dtype=torch.float64, device=x.device) for x in (query, key, value)]
        for _ in range(4)
    ]
    if query.numel() == 0 or key.numel() == 0:
        return GradientReference(*parts)
    limits = torch.finfo(query.dtype)
    for b, h, h_k, mask in _chunks(query, key, attn_mask):
        q, k, v, g = query[b, h], key[b, h_k], value[b, h_k].double(), grad_out[b, h].double()
        heads_k = k.shape[1]
        group = q.shape[1] // heads_k
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        sizes = (q.abs().double() @ k.abs().mT.double()) * abs(scale)
        visible, scores = _visible_and_scores(q, k, mask, band, scale)
        weights = scores.softmax(dim=-1).where(visible, 0)
        grad_weights = (g @ v.mT).where(visible, 0)
        # What rounding of the scores does to P, the whole row alike.
        size = sizes.where(visible, 0).amax(dim=-1, keepdim=True)
        rows = ((weights @ v) * g).square().sum(-1, keepdim=True).sqrt()

        # P below the smallest normal number (of float16, 6e-5) is off by up to half the smallest
        # number at all, or is lost: as if it were this large. Where all rows have the same P, as in
        # some tests, so is their sum. Plain code has the same error, but not always the same luck.
        normal = (weights * (2 / limits.eps)).clamp(max=limits.tiny).maximum(weights)

        def centred(x, sign, outer=weights, weights=weights):
            return outer * (x + sign * (weights * x).sum(-1, keepdim=True))

        rounded = centred(grad_weights.abs(), 1)
        products = centred((g.abs() @ v.abs().mT).where(visible, 0), 1)
        for index, by_scores, by_weights in (
            (0, centred(grad_weights, -1), weights),
            (1, centred(grad_weights.abs(), 1, normal), normal),
            (2, products + size * rounded, size * weights),
            (3, weights * rows, 0 * weights),
        ):
            q_, k_, g_ = (x.double() if index == 0 else x.double().abs() for x in (q, k, g))
            factor = scale if index == 0 else abs(scale)
            parts[index][0][b, h] = factor * (by_scores @ k_)
            parts[index][1][b, h_k] += factor * _sum_of_groups(by_scores.mT @ q_, heads_k)
            parts[index][2][b, h_k] += _sum_of_groups(by_weights.mT @ g_, heads_k)
    return GradientReference(*parts)


def gradients_low(
    grad_out,
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
    """Gradients of plain code in the dtype of the inputs: what autograd makes of attention_low,
    with every tensor rounded on its way back too. Hidden keys and rows without any give 0. Elements
    that are lost because S or dP overflows come from code that rounds everything but these."""
    band, scale = _gradient_options(
        query, key, is_causal, scale, window_left, window_right, bottom_right
    )
    arguments = (grad_out, query, key, value, attn_mask, band, scale)
    plain = _gradients_low(*arguments, query.dtype)
    if all(x.isfinite().all() for x in plain):
        return plain
    wide = _gradients_low(*arguments, torch.promote_types(query.dtype, torch.float32))
    return [x.where(x.isfinite(), y) for x, y in zip(plain, wide, strict=True)]


def _gradients_low(grad_out, query, key, value, attn_mask, band, scale, products_dtype):
    dtype = query.dtype
    accumulator = torch.promote_types(dtype, torch.float32)
    result = [torch.zeros(x.shape, dtype=accumulator, device=x.device) for x in (query, key, value)]
    if query.numel() == 0 or key.numel() == 0:
        return [x.to(dtype) for x in result]
    for b, h, h_k, mask in _chunks(query, key, attn_mask):
        tensors = (query[b, h], key[b, h_k], value[b, h_k], grad_out[b, h])
        q, k, v, g = (x.to(accumulator) for x in tensors)
        heads_k = k.shape[1]
        group = q.shape[1] // heads_k
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = _low_scores(q, k, mask, band, scale, products_dtype)
        weights = _rounded(scores.softmax(dim=-1), dtype).where(scores != -torch.inf, 0)
        grad_weights = _rounded(g @ v.mT, products_dtype)
        inner = (weights * grad_weights).sum(-1, keepdim=True)
        grad_scores = _rounded(weights * (grad_weights - inner), dtype)
        grad_scores = _rounded(grad_scores * scale, dtype)
        result[0][b, h] = grad_scores @ k
        for x, grad in ((result[1], grad_scores.mT @ q), (result[2], weights.mT @ g)):
            x[b, h_k] += _sum_of_groups(_rounded(grad, dtype), heads_k)
    return [x.to(dtype) for x in result]


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
    ulps = 2
    if dtype == accumulator:
        # P is not rounded to fewer digits, so its exponent S - max counts, up to about 8.
        ulps = 8
    if dtype == torch.float64:
        # The reference has the same rounding errors as the result.
        eps, ulps = 2 * eps, 2 * ulps
    score_rounding = eps * reference.score_size[..., None]
    return (
        2 * error.amax(dim=-1, keepdim=True)
        + ulps * ulp(reference.magnitude, dtype)
        + score_rounding * reference.magnitude
    )


def gradient_bounds(reference, low, dtype):
    """The largest accepted errors of the gradients of query, key and value, element by element, and
    the part of them that is left where the exact numbers cancel.

    As error_bound: twice the error of plain code in the same row, and 2 ulp for the rounding of P
    and dS, which no kernel with half-precision products can avoid. What is left: rounding in the
    accumulator, weights too small for it, and O. Kernels take the row sum of dS from rowsum(dO O),
    which needs no second pass over the keys, and O has been rounded to dtype: head_dim errors of up
    to half a unit, about sqrt(head_dim) of them together, weighed as P. Plain code does not round
    there; in rows of few keys, which average nothing out, that is more than all of its errors.
    """
    accumulator = torch.promote_types(dtype, torch.float32)
    eps = (4 + reference.gradients[0].shape[-1] ** 0.5) * torch.finfo(accumulator).eps
    # Without a rounding of P, those of LSE and of S - LSE count, numbers up to about 8.
    ulps = 8 if dtype == accumulator else 2
    if dtype == torch.float64:
        eps, ulps = 2 * eps, 2 * ulps
    bounds, rests = [], []
    for exact, plain, magnitude, accumulated, output in zip(
        reference.gradients,
        low,
        reference.magnitudes,
        reference.accumulated,
        reference.output,
        strict=True,
    ):
        error = (plain.double() - exact).abs().nan_to_num(nan=0.0, posinf=0.0)
        error = error.amax(dim=-1, keepdim=True) if error.numel() else error
        rest = eps * accumulated + 2**13 * torch.finfo(accumulator).tiny
        of_output = torch.finfo(dtype).eps * output
        rests.append(rest + 0.3 * of_output)  # a rounding error's root of the mean square
        bounds.append(2 * error + ulps * ulp(magnitude, dtype) + rest + of_output)
    return bounds, rests


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
    assert out.shape == reference.out.shape, f"{case_id}: out has shape {tuple(out.shape)}"
    if out.numel() == 0:
        return
    _assert_within("out", out, reference.out, error_bound(reference, low, dtype), case_id, low)
    if lse.dtype == torch.float64:
        bound = 1e-10 * (1 + reference.lse.abs())
    else:
        bound = 1e-3 + 1e-5 * reference.lse.abs()
    _assert_within("lse", lse, reference.lse, bound, case_id)
    _assert_alike("out", out, reference.out, low, 2, case_id)


def _assert_within(name, ours, expected, bound, case_id, low=None):
    """NaN and infinities in the same places, and elsewhere errors within bound."""
    assert ours.shape == expected.shape, f"{case_id}: {name} has shape {tuple(ours.shape)}"
    expected_special = expected.to(ours.dtype).double()
    ours = ours.double()
    special = ~expected_special.isfinite() | ~ours.isfinite()
    same = (ours == expected_special) | (ours.isnan() & expected_special.isnan())
    wrong = special & ~same
    if wrong.any():
        at = _first(wrong)
        raise AssertionError(
            f"{case_id}: {name}{list(at)} is {ours[at].item()}, the reference is "
            f"{expected[at].item()}; {int(wrong.sum())} of {wrong.numel()} such elements"
        )
    error = (ours - expected).abs().where(~special, 0)
    excess = error - bound.where(~special, 1)
    if (excess > 0).any():
        at = tuple(int(i) for i in torch.unravel_index(excess.argmax(), excess.shape))
        plain = "" if low is None else f", plain {low.dtype} gives {low[at].item()}"
        raise AssertionError(
            f"{case_id}: {name}{list(at)} is {ours[at].item()}, the reference is "
            f"{expected[at].item()}{plain}: off by {error[at].item():.3e}, accepted is "
            f"{bound[at].item():.3e}; {int((excess > 0).sum())} of {excess.numel()} elements "
            f"are off, the largest error is {error.max().item():.3e}"
        )


def _assert_alike(name, ours, expected, low, factor, case_id, rest=None):
    """Where terms cancel, one element may be off by more than its own digits; many together are
    not: their normalised difference is below 1e-5, or `factor` times that of plain code. rest:
    errors that are accepted whatever the size of the numbers. Many are 8 rows and more: the
    elements of a row share the rounding of P or dS. Of gradients of 4 rows with 2 keys, a model of
    a kernel exceeds this in 8 of 3000 random cases, of 8 rows with 4 keys in none."""
    finite = expected.isfinite() & low.isfinite()
    rows = expected.numel() // max(expected.shape[-1], 1)
    if int(finite.sum()) >= 256 and rows >= 8:
        ours, expected, low = ours[finite].double(), expected[finite], low[finite].double()
        difference = normalised_difference(ours, expected)
        accepted = max(1e-5, factor * normalised_difference(low, expected))
        if rest is not None:
            total = (ours.square() + expected.square()).sum().clamp(min=1e-300)
            accepted += float(rest[finite].square().sum() / total)
        assert difference <= accepted, (
            f"{case_id}: normalised difference of {name} is {difference:.3e}, accepted is "
            f"{accepted:.3e}"
        )


def assert_gradients_close(gradients, reference, low, case_id):
    """Checks one result of fa::backward against gradients_ref and gradients_low of its inputs, as
    assert_close_to_reference does for fa::forward."""
    bounds, rests = gradient_bounds(reference, low, gradients[0].dtype)
    for name, ours, expected, plain, bound, rest in zip(
        NAMES, gradients, reference.gradients, low, bounds, rests, strict=True
    ):
        if ours.numel():
            _assert_within(f"grad_{name}", ours, expected, bound, case_id, plain)
            # Twice the error is four times its square.
            _assert_alike(f"grad_{name}", ours, expected, plain, 4, case_id, rest)


def _leave_nan_behind(*results):
    """Frees memory full of NaN."""
    # Blocks of the sizes of the results, two each in case one is taken for something else, and
    # large blocks that an allocator cuts others from.
    query = results[0]
    stale = [torch.full_like(x, torch.nan) for x in results for _ in range(2)]
    stale += [torch.full(query.shape[:3], torch.nan, device=query.device) for _ in range(2)]
    stale += [torch.full((2**18,), torch.nan, device=query.device) for _ in range(4)]


def forward(query, key, value, attn_mask=None, **options):
    """fa::forward with NaN in the memory that it is likely to get: none of it may show."""
    _leave_nan_behind(query)
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


def backward(grad_out, query, key, value, out, lse, attn_mask=None, **options):
    """fa::backward with NaN in the memory that it is likely to get: none of it may show."""
    _leave_nan_behind(query, key, value)
    return torch.ops.fa.backward(grad_out, query, key, value, out, lse, attn_mask, **options)


def check_gradients(
    query,
    key,
    value,
    attn_mask=None,
    *,
    grad_out=None,
    case_id=None,
    deterministic=False,
    **options,
):
    """Runs fa::forward and fa::backward, compares the gradients with the reference, and returns
    them."""
    if grad_out is None:
        grad_out = torch.randn(query.shape).to(query.dtype).to(query.device)
    out, lse = forward(query, key, value, attn_mask, **options)
    arguments = (query, key, value, attn_mask)
    gradients = backward(
        grad_out, query, key, value, out, lse, attn_mask, deterministic=deterministic, **options
    )
    if case_id is None:
        shapes = [tuple(x.shape) for x in (query, key, attn_mask) if x is not None]
        case_id = f"{query.device.type} {query.dtype} {shapes} {options}"
    for name, tensor, gradient in zip(NAMES, arguments, gradients, strict=False):
        assert gradient.dtype == tensor.dtype, f"{case_id}: grad_{name} is {gradient.dtype}"
        assert gradient.stride() == torch.empty_like(tensor).stride(), (
            f"{case_id}: grad_{name} has strides {gradient.stride()}, {name} {tensor.stride()}"
        )
    reference = gradients_ref(grad_out, *arguments, **options)
    low = gradients_low(grad_out, *arguments, **options)
    assert_gradients_close(gradients, reference, low, case_id)
    return gradients


def close(a, b, dtype):
    """Asserts that two results, both right within rounding in dtype, are alike. Where one of them
    is wrong, check shows it; here whole rows or heads would be exchanged."""
    tolerance = (4 if dtype in (torch.float16, torch.bfloat16) else 256) * torch.finfo(dtype).eps
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
