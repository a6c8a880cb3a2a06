"""fa::merge_states and its public function: parts of the keys against all of them."""

import itertools
import math

import pytest
import torch
from reference import close

from flashattn_ext import flash_attn_func, merge_states


def randn(*shape, device, dtype=torch.bfloat16):
    return (torch.randn(shape) + 0.5).to(dtype).to(device)


def parts_of(q, k, v, cuts, **options):
    edges = [0, *cuts, k.shape[1]]
    for begin, end in itertools.pairwise(edges):
        out, lse, _ = flash_attn_func(
            q, k[:, begin:end], v[:, begin:end], return_attn_probs=True, **options
        )
        yield out, lse


@pytest.mark.parametrize("cuts", [[50], [1], [99], [0], [100], [10, 10, 60]], ids=str)
def test_merge(device, cuts):
    """Parts of the keys, empty ones too, merge to what all keys give."""
    q, k, v = (randn(2, s, h, 64, device=device) for s, h in ((7, 4), (100, 2), (100, 2)))
    parts = list(parts_of(q, k, v, cuts))
    out, lse = parts[0]
    for other in parts[1:]:
        out, lse = merge_states(out, lse, *other)
    expected, expected_lse, _ = flash_attn_func(q, k, v, return_attn_probs=True)
    assert out.dtype == q.dtype and lse.dtype == torch.float32
    close(out, expected, q.dtype)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-4)


def test_merge_ignores_empty_parts(device):
    out = randn(1, 3, 2, 8, device=device)
    lse = torch.randn(1, 2, 3, device=device)
    empty = torch.full_like(out, torch.nan), torch.full_like(lse, -math.inf)
    for merged in (merge_states(out, lse, *empty), merge_states(*empty, out, lse)):
        assert torch.equal(merged[0], out) and torch.equal(merged[1], lse)
    nothing, lse = merge_states(*empty, *empty)
    assert (nothing == 0).all() and (lse == -math.inf).all()


def test_merge_of_distant_parts(device):
    """LSEs whose exponentials overflow."""
    a, b = (torch.full((1, 1, 1, 8), x, device=device) for x in (1.0, 2.0))
    lse = torch.full((1, 1, 1), 1e4, device=device)
    for sign in (1, -1):
        assert (merge_states(a, sign * lse, b, sign * lse)[0] == 1.5).all()
        assert (merge_states(a, sign * lse, b, sign * lse - 1000)[0] == 1).all()
    assert merge_states(a, lse * torch.nan, b, lse)[0].isnan().all()


def test_merge_gradients(device):
    options = {"device": device, "dtype": torch.float64}
    a, b = (torch.randn(1, 3, 2, 4, **options).requires_grad_() for _ in range(2))
    lse_a, lse_b = (torch.randn(1, 2, 3, **options) for _ in range(2))
    lse_a[0, 0, :2] = -math.inf
    lse_b[0, 0, 1:] = -math.inf
    lse_a, lse_b = lse_a.requires_grad_(), lse_b.requires_grad_()
    out, lse = merge_states(a, lse_a, b, lse_b)
    gradients = torch.autograd.grad(
        out.sum() + lse.where(lse.isfinite(), 0).sum(), (a, lse_a, b, lse_b)
    )
    assert all(gradient.isfinite().all() for gradient in gradients)
    plain = [torch.randn(2, 3, 4, **options).requires_grad_() for _ in range(2)]
    lses = [torch.randn(2, 3, **options).requires_grad_() for _ in range(2)]
    torch.autograd.gradcheck(torch.ops.fa.merge_states, (plain[0], lses[0], plain[1], lses[1]))


def test_merge_packed(device):
    """The layout of flash_attn_varlen_func; the LSE has the dtype of the first."""
    parts = [(torch.randn(7, 4, 16, device=device), torch.randn(4, 7, device=device)) for _ in "ab"]
    (out_a, lse_a), (out_b, lse_b) = parts
    out, lse = merge_states(out_a, lse_a, out_b, lse_b.double())
    batched = merge_states(*(x.unsqueeze(0) for part in parts for x in part))
    assert out.shape == out_a.shape and lse.dtype == torch.float32
    close(out, batched[0].squeeze(0), torch.float32)
    close(lse, batched[1].squeeze(0), torch.float32)
    with pytest.raises(RuntimeError, match=r"out_a: must have 4 dimensions .* got 2: \(7, 16\)"):
        merge_states(out_a[:, 0], lse_a[0], out_b[:, 0], lse_b[0])


def test_merge_refuses_an_lse_without_gradient(device):
    query, key, value = (randn(1, 3, 2, 32, device=device).requires_grad_() for _ in range(3))
    parts = [
        flash_attn_func(query, key[:, i], value[:, i], return_attn_probs=True)[:2]
        for i in (slice(0, 1), slice(1, 3))
    ]
    with pytest.raises(RuntimeError, match="lse_a: must require grad where out_a does"):
        merge_states(*parts[0], *parts[1])
    with torch.no_grad():
        merge_states(*parts[0], *parts[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"out_b": torch.zeros(2, 3, 9)}, r"out_b: shape must be that of out_a \[2, 3, 8\]"),
        ({"lse_a": torch.zeros(2, 4)}, r"lse_a: shape must be .* \[2, 3\], got \[2, 4\]"),
        ({"lse_b": torch.zeros(2, 3, dtype=torch.int32)}, "lse_b: dtype must be float16"),
        ({"out_a": torch.zeros(2, 3, 8).to(torch.float8_e4m3fn)}, "out_a: dtype must be float16"),
    ],
)
def test_wrong_states(change, message):
    out, lse = torch.zeros(2, 3, 8), torch.zeros(2, 3)
    given = {"out_a": out, "lse_a": lse, "out_b": out, "lse_b": lse}
    with pytest.raises(RuntimeError, match=message):
        torch.ops.fa.merge_states(**given | change)
