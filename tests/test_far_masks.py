"""Additive masks that hide with the lowest finite number, as transformers builds them, instead of
-inf: hidden keys count in rows that see nothing else, and NaN and infinities behind them show."""

import pytest
import torch
from cases import BANDS, HALF, qkv
from reference import attention_ref, check, close, forward

MASK_DTYPES = [
    *((dtype, dtype) for dtype in HALF),
    *((dtype, torch.float32) for dtype in HALF),
]
each_dtype = pytest.mark.parametrize("dtype,mask_dtype", MASK_DTYPES, ids=str)
each_head_dim = pytest.mark.parametrize("head_dim", [64, 128, 256])


def lowest_mask(visible, mask_dtype, device):
    """0 for visible keys, the lowest finite number for the others."""
    mask = torch.zeros(visible.shape, dtype=mask_dtype)
    return mask.masked_fill(~visible, torch.finfo(mask_dtype).min).to(device)


def causal(seqlen_q, seqlen_k):
    return torch.ones(seqlen_q, seqlen_k, dtype=torch.bool).tril(seqlen_k - seqlen_q)


def padded_causal(lengths, seqlen, side):
    """Bool [batch, 1, seqlen, seqlen]: causality in sequences of these lengths with padding."""
    lengths = torch.tensor(lengths)[:, None]
    real = torch.arange(seqlen) < lengths
    real = real if side == "right" else real.flip(1)
    return (causal(seqlen, seqlen) & real[:, None])[:, None]


@each_dtype
@each_head_dim
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batch(device, dtype, mask_dtype, head_dim, side):
    """With padding on the left, its rows see far keys only: the mean over all keys."""
    lengths = (330, 329, 260, 200, 7)
    visible = padded_causal(lengths, 330, side)
    tensors = qkv((4, 2), (330, 330), head_dim, device=device, batch=5, dtype=dtype)
    out, _ = check(*tensors, lowest_mask(visible, mask_dtype, device))
    if side == "left" and mask_dtype == torch.float32:
        mean = tensors[2].double().mean(2).repeat_interleave(2, 1)
        expected = mean[4, :, None].to(dtype).expand(4, 323, head_dim)
        close(out[4, :, :323], expected, dtype)
    # Rows with a visible key: as if the others were hidden.
    hidden, _ = forward(*tensors, visible.to(device))
    rows = visible.any(-1)[:, 0]
    for b in range(5):
        close(out[b][:, rows[b]], hidden[b][:, rows[b]], dtype)


@each_dtype
@each_head_dim
def test_padded_keys(device, dtype, mask_dtype, head_dim):
    """One row of the mask serves all queries of a batch entry; the last entry has far keys only."""
    real = torch.arange(450) < torch.tensor([450, 385, 64, 63, 1, 0])[:, None]
    tensors = qkv((2, 2), (200, 450), head_dim, device=device, batch=6, dtype=dtype)
    check(*tensors, lowest_mask(real[:, None, None], mask_dtype, device))


@each_dtype
@pytest.mark.parametrize("rows", [[0], [77], [199], [64, 127], list(range(60, 70))], ids=str)
def test_rows_with_far_keys_only_among_others(device, dtype, mask_dtype, rows):
    """What the rows of a tile can spare, a single one among them may need."""
    visible = torch.zeros(200, 520, dtype=torch.bool)
    visible[:, 130:140] = True
    visible[rows] = False
    tensors = qkv((2, 1), (200, 520), 128, device=device, dtype=dtype)
    check(*tensors, lowest_mask(visible, mask_dtype, device))


@each_dtype
@pytest.mark.parametrize("band", BANDS, ids=str)
def test_with_a_band(device, dtype, mask_dtype, band):
    options = dict(band)
    options["window_left"], options["window_right"] = options.pop("window", (-1, -1))
    tensors = qkv((2, 1), (333, 400), 64, device=device, dtype=dtype)
    for visible in (
        causal(333, 400),
        torch.ones(333, 400, dtype=torch.bool).triu(1),  # visible where causality hides
        torch.arange(400).expand(333, 400) >= 330,
        torch.arange(400).expand(333, 400) < 20,
    ):
        check(*tensors, lowest_mask(visible, mask_dtype, device), **options)


@each_dtype
def test_normal_keys_that_causality_hides(device, dtype, mask_dtype):
    """Rows whose normal keys all lie behind the diagonal have the mean over those before it."""
    visible = torch.ones(330, 330, dtype=torch.bool).triu(1)
    tensors = qkv((1, 1), (330, 330), 64, device=device, dtype=dtype)
    mask = lowest_mask(visible, mask_dtype, device)
    out, _ = check(*tensors, mask, is_causal=True)
    if mask_dtype == torch.float32:
        counts = torch.arange(1, 331, device=device)[:, None]
        expected = tensors[2].double().cumsum(2) / counts
        close(out, expected.to(dtype), dtype)


@each_dtype
@pytest.mark.parametrize(
    "shape",
    [(2, 4, 200, 333), (1, 4, 200, 333), (2, 1, 200, 333), (200, 333), (2, 1, 1, 333), (333,)],
    ids=str,
)
def test_broadcast(device, dtype, mask_dtype, shape):
    """Runs of far keys that differ by batch entry, head and row where the mask has them."""
    visible = torch.ones(shape, dtype=torch.bool)
    for index, row in enumerate(visible.view(-1, 333)):
        first = 17 * index % 200
        row[first : first + 130] = False
    tensors = qkv((4, 2), (200, 333), 64, device=device, batch=2, dtype=dtype)
    check(*tensors, lowest_mask(visible, mask_dtype, device))
    check(*tensors, lowest_mask(~visible, mask_dtype, device), is_causal=True)


@each_dtype
def test_odd_sizes(device, dtype, mask_dtype):
    for heads, seqlens, head_dim in (
        ((1, 1), (1, 500), 64),
        ((6, 2), (3, 1000), 128),
        ((2, 2), (65, 129), 40),
        ((8, 1), (193, 321), 96),
        ((2, 1), (500, 64), 256),
        ((3, 3), (129, 63), 33),
    ):
        visible = causal(*seqlens)
        visible[:, : seqlens[1] // 3] = False
        tensors = qkv(heads, seqlens, head_dim, device=device, dtype=dtype)
        check(*tensors, lowest_mask(visible, mask_dtype, device))


@each_dtype
def test_beside_hidden_and_biased_keys(device, dtype, mask_dtype):
    """Whole blocks of -inf, of the lowest number, of -1e9 where the dtype has it, and of -5."""
    mask = torch.zeros(260, 640)
    mask[:, 64:192] = torch.finfo(mask_dtype).min
    mask[:, 192:320] = -torch.inf
    mask[128:, 320:448] = max(-1e9, torch.finfo(mask_dtype).min)
    mask[:, 512:] = -5.0
    tensors = qkv((2, 1), (260, 640), 64, device=device, dtype=dtype)
    for first_normal in (0, 64, 640):
        mask[:64, :first_normal] = torch.finfo(mask_dtype).min
        check(*tensors, mask.to(mask_dtype).to(device))


def check_special(*tensors, **options):
    """NaN and infinities where the reference has them. LSE of infinite scores is left open."""
    out, _ = forward(*tensors, **options)
    expected = attention_ref(*tensors, **options).out.to(out.dtype)
    assert torch.equal(out.isnan(), expected.isnan())
    nowhere = expected.isnan()
    close(out.masked_fill(nowhere, 0), expected.masked_fill(nowhere, 0), out.dtype)
    return out


@each_dtype
@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("which", [0, 1, 2], ids=["query", "key", "value"])
def test_numbers_that_show_behind_far_keys(device, dtype, mask_dtype, which, number):
    """Keys that weigh nothing: 0 * NaN and 0 * inf are NaN all the same."""
    mask = lowest_mask(causal(330, 330), mask_dtype, device)
    for row in (5, 200, 329):
        tensors = qkv((2, 1), (330, 330), 64, device=device, dtype=dtype)
        tensors[1][:, :, 0, 7], tensors[1][:, :, 1, 7] = (
            1.0,
            -1.0,
        )  # an infinite query has both signs
        tensors[which][:, :, row, 7] = number
        out = check_special(*tensors, mask)
        if which == 2:
            assert out[:, :, :row, 7].isnan().all() and not out[..., 8].isnan().any()
        elif which == 1 and number != number:
            assert out.isnan().all()
        if which < 2:  # scores that the band hides are not there
            out = check_special(*tensors, mask, is_causal=True)
            assert not out[:, :, :row].isnan().any()


@pytest.mark.parametrize("mask_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_scores_as_large_as_the_mask(device, mask_dtype):
    """A far key whose score makes up for its bias has the largest sum: the output is its value."""
    query, key, value = qkv((2, 1), (200, 400), 64, device=device, dtype=torch.bfloat16)
    query.zero_()[..., 3] = 1e19
    key.zero_()[..., 3] = -2e19
    visible = torch.arange(400).expand(200, 400) < 150
    mask = lowest_mask(visible, mask_dtype, device)
    for far in (150, 256, 399):
        other = key.clone()
        other[:, :, far, 3] = 2e19
        reference = attention_ref(query, other, value, mask, scale=1.0)
        expected = value[:, :, far : far + 1].expand_as(query)
        assert torch.equal(reference.out, expected.double())
        out, lse = forward(query, other, value, mask, scale=1.0)
        assert torch.equal(out, expected)
        torch.testing.assert_close(lse.double(), reference.lse, rtol=1e-5, atol=0)
    # Where no far key does, normal ones share the weight.
    out, _ = forward(query, key, value, mask, scale=1.0)
    mean = value[:, :, :150].double().mean(2, keepdim=True)
    close(out, mean.to(out.dtype).expand_as(out), out.dtype)


@each_dtype
@pytest.mark.parametrize("scale", [1e-4, 1.0, 255.0, 300.0])
def test_scale(device, dtype, mask_dtype, scale):
    visible = padded_causal((200, 130), 200, "left")
    query, key, value = qkv((2, 1), (200, 200), 64, device=device, batch=2, dtype=dtype)
    query = query / max(scale, 1.0)
    check(query, key, value, lowest_mask(visible, mask_dtype, device), scale=scale)


def test_values_that_change_between_calls(device):
    """The values of the call count, not those of one before with the same mask."""
    query, key, value = qkv((2, 1), (200, 400), 64, device=device)
    mask = lowest_mask(torch.arange(400).expand(200, 400) < 150, torch.float32, device)
    for number in (0.0, float("nan"), 1.0):
        value[:, :, 300, 5] = number
        out, _ = check(query, key, value, mask)
        assert out[..., 5].isnan().all() == (number != number)
