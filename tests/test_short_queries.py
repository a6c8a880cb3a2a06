"""fa::forward with so few queries that the decoding kernels take it: every length, head group,
band, scale, layout and kind of numbers, and that on CUDA these kernels do take it."""

import dataclasses
import math

import pytest
import torch
from cases import HALF, LAYOUTS, VALUES, Case, alternate, on_devices, randn
from reference import check, forward

import flashattn_ext


def short():
    dtypes, head_dims = alternate(HALF), alternate((64, 128, 256, 96, 33, 72))
    for seqlen_q in (1, 2, 5, 16):
        for seqlen_k in (1, 7, 64, 129, 1000, 5000):
            yield Case(next(dtypes), seqlens=(seqlen_q, seqlen_k), head_dim=next(head_dims))
    for seqlen_q in (33, 64, 65, 100):  # wgmma on Hopper: both tiles, and more than one
        for head_dim in (64, 72, 100, 128):
            case = Case(next(dtypes), heads=(4, 4), seqlens=(seqlen_q, 1200), head_dim=head_dim)
            yield dataclasses.replace(case, is_causal=True, bottom_right=True, window=(700, 0))
            yield dataclasses.replace(case, scale=-0.2 if head_dim == 72 else None)
    for is_causal in (False, True):
        chunk = Case(heads=(2, 1), seqlens=(200, 5000), is_causal=is_causal, bottom_right=True)
        yield dataclasses.replace(chunk, head_dim=128, batch=1)
        yield dataclasses.replace(chunk, dtype=torch.float16, seqlens=(300, 2500))
    for heads in ((7, 1), (14, 2), (32, 8), (64, 4), (6, 6)):
        yield Case(next(dtypes), heads=heads, seqlens=(3, 300), head_dim=128, is_causal=True)
        yield Case(next(dtypes), heads=heads, seqlens=(1, 700), head_dim=64, bottom_right=True)
    for window in ((-1, -1), (0, 0), (40, 3), (5, -1), (-1, 2), (2000, 2000)):
        for seqlens in ((9, 600), (16, 4), (1, 4000)):
            for bottom_right in (False, True):
                for is_causal in (False, True):
                    yield Case(
                        next(dtypes),
                        heads=(4, 2),
                        seqlens=seqlens,
                        is_causal=is_causal,
                        window=window,
                        bottom_right=bottom_right,
                        batch=1,
                    )
    for mask in ("bool-b11k", "bool-b1qk", "bool-11qk", "bool-111k", "bool-11q1"):
        for seqlens in ((1, 700), (8, 333), (5, 3001), (3, 1)):
            case = Case(next(dtypes), heads=(4, 2), seqlens=seqlens, head_dim=128, mask=mask)
            yield case
            yield dataclasses.replace(case, is_causal=True, bottom_right=True, head_dim=80)
            yield dataclasses.replace(case, heads=(12, 1), window=(300, 2), dtype=next(dtypes))
    short = Case(heads=(4, 2), seqlens=(4, 333), head_dim=128)
    for scale in (0.0, 1.0, -0.3, 4.0):
        yield dataclasses.replace(short, dtype=next(dtypes), scale=scale)
    for values in VALUES:
        yield dataclasses.replace(short, dtype=next(dtypes), values=values, seqlens=(4, 3000))
    for layout in LAYOUTS:
        if layout not in ("contiguous", "same_tensor", "packed_qkv"):
            yield dataclasses.replace(short, dtype=next(dtypes), layout=layout, is_causal=True)
    for layout in ("packed_qkv", "same_tensor"):  # as many queries as keys
        yield Case(next(dtypes), seqlens=(12, 12), layout=layout, is_causal=True)


@on_devices(list(short()))
def test_against_the_reference(device, case):
    *tensors, mask = case.build(device)
    check(*tensors, mask, case_id=f"{device}-{case.id}", **case.options)
    if device == "cuda" and (mask is None or mask.shape[-1] == case.seqlens[1]):
        text = flashattn_ext.forward_kernel(*tensors, mask, **case.options)
        assert text.startswith("decode"), text


def test_visible_nan_shows_and_hidden_keys_are_not_read(device):
    """NaN in a query or a visible key shows in its rows alone; keys past all rows do not count."""
    query, key, value = (randn(1, h, s, 64, device=device) for h, s in ((4, 3), (2, 900), (2, 900)))
    key[:, :, 3:], value[:, :, 3:] = math.nan, math.inf
    query[0, 1, 2] = math.nan
    out, lse = forward(query, key, value, is_causal=True)  # top-left: keys 0 to 2
    expected = torch.zeros(1, 4, 3, dtype=torch.bool, device=device)
    expected[0, 1, 2] = True
    assert torch.equal(lse.isnan(), expected)
    assert torch.equal(out.isnan().all(-1), expected) and torch.equal(out.isnan().any(-1), expected)


@pytest.mark.parametrize("seqlen_q", [1, 3])
@pytest.mark.parametrize("offset", [0, 1, 13])
def test_static_cache(device, offset, seqlen_q):
    """Masks of a cache that is filled in part, behind left padding: any alignment, a sequence
    without keys, and keys hidden among visible ones. What is not filled is not read on CUDA."""
    batch, capacity, filled = 4, 3000, (2000, 777, 64, 0)
    pads = (0, 100, 63, 0)
    query = randn(batch, 4, seqlen_q, 64, device=device)
    key, value = (randn(batch, 2, capacity, 64, device=device) for _ in range(2))
    room = torch.zeros(batch, 1, seqlen_q, capacity + offset, dtype=torch.bool)
    for b, (pad, end) in enumerate(zip(pads, filled, strict=True)):
        for i in range(seqlen_q):
            room[b, 0, i, offset + pad : offset + max(end - seqlen_q + 1 + i, 0)] = True
    room[0, 0, :, offset + 500 : offset + 600 : 7] = False
    mask = room.to(device)[..., offset:]
    check(query, key, value, mask, case_id=f"{device} {seqlen_q}")
    expected = forward(query, key, value, mask)
    if device == "cuda":
        for b, (pad, end) in enumerate(zip(pads, filled, strict=True)):
            for tensor in (key, value):
                tensor[b, :, end:] = math.nan
                tensor[b, :, :pad] = math.nan
        ours = forward(query, key, value, mask)
        assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
    assert (expected[0][3] == 0).all() and (expected[1][3] == -math.inf).all()


def test_rows_without_keys(device):
    """Bottom-right with more queries than keys, and a window beside all keys."""
    query, key = randn(2, 4, 6, 64, device=device), randn(2, 2, 4, 64, device=device)
    out, lse = forward(query, key, key, is_causal=True, bottom_right=True)
    assert (out[:, :, :2] == 0).all() and (lse[:, :, :2] == -math.inf).all()
    assert lse[:, :, 2:].isfinite().all()
    few = randn(2, 2, 1, 64, device=device)
    out, lse = forward(query, few, few, window_left=2)
    assert (out[:, :, 3:] == 0).all() and (lse[:, :, 3:] == -math.inf).all()


def test_gradients_of_few_queries(device):
    """The LSE of these kernels is what the backward wants."""
    tensors = [randn(1, h, s, 64, device=device) for h, s in ((4, 5), (2, 700), (2, 700))]
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    exact = [x.double().requires_grad_() for x in tensors]
    torch.ops.fa.forward(*leaves)[0].float().sum().backward()
    torch.nn.functional.scaled_dot_product_attention(*exact, enable_gqa=True).sum().backward()
    for ours, theirs in zip(leaves, exact, strict=True):
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("seqlen_q", [1, 8])
def test_repeats(device, seqlen_q):
    tensors = [randn(1, h, s, 128, device=device) for h, s in ((8, seqlen_q), (2, 6000), (2, 6000))]
    first = forward(*tensors)
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(forward(*tensors), first, strict=True))


def test_cuda_graph(device):
    """A captured call, splits and their scratch included, is replayed with other numbers."""
    if device != "cuda":
        pytest.skip("CUDA graphs need a GPU")
    tensors = [randn(1, h, s, 128, device=device) for h, s in ((16, 1), (8, 4096), (8, 4096))]
    forward(*tensors)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = torch.ops.fa.forward(*tensors)
    for x in tensors:
        x.copy_(torch.randn_like(x))
    graph.replay()
    expected = torch.ops.fa.forward(*tensors)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


@pytest.mark.parametrize("size", [128.0, 4096.0])
@pytest.mark.parametrize("seqlen_q", [1, 24, 100])
def test_splits_of_large_scores(device, size, seqlen_q):
    """Parts of unequal length are merged by the sums of their exponentials: an LSE of millions has
    no digits left for them."""
    query = torch.full((1, 2, seqlen_q, 64), size, dtype=torch.half, device=device)
    key = torch.full((1, 2, 2100, 64), size, dtype=torch.half, device=device)
    value = randn(1, 2, 2100, 64, device=device)
    for keys in (130, 300, 2100):
        out, _ = forward(query, key[:, :, :keys], value[:, :, :keys])
        mean = value[:, :, :keys].double().mean(-2, keepdim=True).expand_as(out)
        torch.testing.assert_close(out.double(), mean, rtol=1e-2, atol=2e-3)
        for num_splits in (2, 3, 16):
            bshd = (x.transpose(1, 2) for x in (query, key[:, :, :keys], value[:, :, :keys]))
            out, _ = torch.ops.fa.forward_kvcache(*bshd, num_splits=num_splits)
            torch.testing.assert_close(out.transpose(1, 2).double(), mean, rtol=1e-2, atol=2e-3)


@pytest.mark.parametrize("seqlen_q", [1, 3, 40])
def test_empty_splits_beside_cold_scores(device, seqlen_q):
    """A split without keys has no maximum, and none that others are measured by: with scores of
    -128 that of 0 would leave nothing of them."""
    query = torch.full((1, seqlen_q, 2, 64), 8.0, dtype=torch.half, device=device)
    cache = torch.full((1, 4096, 2, 64), torch.nan, dtype=torch.half, device=device)
    cache[:, :40] = -8.0
    values = torch.full_like(cache, torch.nan)
    values[:, :40] = randn(1, 40, 2, 64, device=device)
    seqlens = torch.tensor([40], dtype=torch.int32, device=device)
    mean = values[:, :40].double().mean(1, keepdim=True).expand(query.shape)
    lse = torch.full((1, 2, seqlen_q), math.log(40) - 128.0, device=device)
    for options in ({"num_splits": n} for n in (1, 2, 4, 16)):
        out, out_lse = torch.ops.fa.forward_kvcache(
            query, cache, values, seqlens, scale=1 / 32, **options
        )
        torch.testing.assert_close(out.double(), mean, rtol=1e-2, atol=2e-3)
        torch.testing.assert_close(out_lse, lse, rtol=0, atol=1e-3)
    mask = torch.zeros(1, 1, seqlen_q, 4096, dtype=torch.bool, device=device)
    mask[..., :40] = True
    out, _ = forward(
        query.transpose(1, 2),
        cache.nan_to_num().transpose(1, 2),
        values.nan_to_num().transpose(1, 2),
        mask,
        scale=1 / 32,
    )
    torch.testing.assert_close(out.transpose(1, 2).double(), mean, rtol=1e-2, atol=2e-3)
