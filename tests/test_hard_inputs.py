"""More inputs of the kinds that broke other libraries, without a report behind them: masks, values
near the limits of a dtype, views, threads, global settings."""

import concurrent.futures

import pytest
import torch
from cases import HALF, Case, qkv, randn
from reference import check, close, forward


@pytest.mark.parametrize("kind", ["bool", "own"])
def test_tiles_without_keys_anywhere(device, kind):
    """Stretches of 64, 128 or 192 hidden keys at the start, in the middle and at the end, for some
    rows of a tile or for all, so that the first tile of either direction has nothing in it."""
    query, key, value = qkv((2, 1), (150, 448), 64, device=device)
    for first, last in ((0, 64), (0, 384), (64, 128), (128, 320), (384, 448), (64, 448), (1, 447)):
        for rows in (slice(0, 150), slice(0, 70), slice(0, 150, 2)):
            visible = torch.ones(150, 448, dtype=torch.bool)
            visible[rows, first:last] = False
            mask = visible
            if kind == "own":
                mask = torch.zeros(150, 448).masked_fill(~visible, -torch.inf).half()
            check(query, key, value, mask.to(device))


def test_mask_hides_all_that_causality_leaves(device):
    """A row that sees nothing for two reasons, each of which leaves keys."""
    tensors = qkv((2, 1), (130, 130), 64, device=device)
    mask = torch.ones(130, 130, dtype=torch.bool).triu(1)
    mask[77] = True
    out, lse = check(*tensors, mask.to(device), is_causal=True)
    rows = torch.arange(130) != 77
    assert (lse[:, :, rows] == -torch.inf).all() and not out[:, :, rows].any()
    assert lse[:, :, 77].isfinite().all()


def test_hidden_rows_are_zero_whatever_the_values(device):
    """A row without keys is 0 also where query, key and value hold NaN."""
    query, key, value = qkv((1, 1), (70, 70), 64, device=device)
    mask = torch.ones(70, 1, dtype=torch.bool, device=device)
    mask[3:20] = False
    query[:, :, 5] = torch.nan
    value[:, :, 30] = torch.nan
    out, lse = forward(query, key, value, mask)
    assert not out[:, :, 3:20].any() and (lse[:, :, 3:20] == -torch.inf).all()
    assert out[:, :, :3].isnan().all() and out[:, :, 20:].isnan().all()


def test_mask_changed_in_place(device):
    """The mask of the call counts, not one seen before at the same address."""
    tensors = qkv((2, 1), (200, 260), 64, device=device)
    mask = torch.zeros(200, 260, dtype=torch.float16, device=device)
    check(*tensors, mask)
    for block in (slice(0, 64), slice(64, 192), slice(192, 260)):
        mask.zero_()
        mask[:, block] = -torch.inf
        check(*tensors, mask)
    mask.zero_()
    mask[100, 130] = 3.0
    check(*tensors, mask)
    bias = torch.full_like(mask, 0.0)
    bias[70:, 5] = -1.0
    check(*tensors, bias)


def test_bool_mask_of_any_byte(device):
    """A bool tensor viewed from uint8 may hold other values than 0 and 1; all of them are true."""
    codes = torch.randint(0, 4, (40, 90), dtype=torch.uint8)
    codes = torch.tensor([0, 1, 2, 255], dtype=torch.uint8)[codes.long()]
    tensors = qkv((2, 1), (40, 90), 64, device=device)
    out, lse = forward(*tensors, codes.to(device).view(torch.bool))
    right, right_lse = check(*tensors, (codes != 0).to(device))
    assert torch.equal(out, right) and torch.equal(lse, right_lse)


def test_mask_whose_elements_overlap(device):
    """A bias by position, read from one vector: both strides are 1."""
    bias = randn(400, device=device)
    check(*qkv((2, 1), (130, 200), 64, device=device), bias.as_strided((130, 200), (1, 1), 7))


def test_shift_of_a_whole_row(device):
    """A constant added to all scores of a row leaves the output and moves the LSE."""
    tensors = qkv((2, 1), (20, 300), 64, device=device)
    out, lse = check(*tensors)
    for shift in (-1000.0, -120.0, 88.0, 700.0):
        mask = torch.full((20, 300), shift, device=device)
        shifted, shifted_lse = check(*tensors, mask)
        close(shifted, out, torch.float16)
        torch.testing.assert_close(shifted_lse, lse + shift, rtol=1e-5, atol=1e-3)


def test_nan_in_a_mask(device):
    """NaN in an additive mask is a live input: it shows, in its row only."""
    tensors = qkv((2, 1), (70, 100), 64, device=device)
    for dtype in (torch.float16, torch.float32):
        mask = torch.zeros(70, 100, dtype=dtype, device=device)
        mask[33, 70] = torch.nan
        out, lse = check(*tensors, mask)
        assert out[:, :, 33].isnan().all() and int(out.isnan().sum()) == 2 * 64
        assert int(lse.isnan().sum()) == 2
        # Unless the band hides the key.
        out, _ = check(*tensors, mask, is_causal=True)
        assert not out.isnan().any()


def test_infinite_key(device):
    """An infinite score has no softmax: NaN, as in plain code, in the rows that see the key."""
    query, key, value = qkv((1, 1), (70, 70), 64, device=device)
    query = query.abs()
    key[:, :, 40] = torch.inf
    out, _ = forward(query, key, value, is_causal=True)
    assert out[:, :, 40:].isnan().all()
    clean = key.clone()
    clean[:, :, 40] = 0
    expected, _ = check(query, clean, value, is_causal=True)
    close(out[:, :, :40], expected[:, :, :40], torch.float16)


def test_largest_float16_values(device):
    """The mean of the largest finite numbers is that number, not infinity."""
    for seqlen_k in (1, 2, 63, 64, 1000):
        query, key, value = qkv((1, 1), (5, seqlen_k), 64, device=device)
        out, _ = forward(query, torch.zeros_like(key), torch.full_like(value, 65504.0))
        assert (out == 65504.0).all()


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("first_keys", [False, True], ids=["larger scores", "first keys"])
def test_maximum_that_moves_behind_hidden_blocks(device, head_dim, first_keys):
    """Blocks that the mask hides from some rows only. The keys beyond have larger scores than all
    before, or are the first ones of some rows: sums and weights have to follow together."""
    query, key, value = qkv((2, 1), (192, 512), head_dim, device=device)
    mask = torch.ones(192, 512, dtype=torch.bool)
    for i in range(3):  # block 2 + i is hidden from 64 rows, and loaded for the others
        first = 64 * (2 + i)
        mask[64 * i : 64 * i + 64, first : first + 64] = False
        if first_keys:
            mask[64 * i : 64 * i + 8, first:] = False
    if not first_keys:
        for block, factor in ((3, 4), (2, 8), (1, 16)):
            key[:, :, 64 * block : 64 * block + 64] *= factor
    check(query, key, value, mask.to(device))


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("size", [128.0, 512.0, 2048.0, 16384.0, 32768.0])
def test_equal_scores_however_large(device, dtype, masked, size):
    """Weights are the same, and the output is the mean of value, whatever the scores are. Powers of
    two, whose products have the same sum in every order."""
    for head_dim in (64, 128):
        query = torch.full((1, 1, 70, head_dim), size, dtype=dtype, device=device)
        key = torch.full((1, 1, 300, head_dim), size, dtype=dtype, device=device)
        value = randn(1, 1, 300, head_dim, dtype=dtype, device=device)
        mask = torch.ones(70, 300, dtype=torch.bool, device=device) if masked else None
        out, lse = forward(query, key, value, mask)
        mean = value.double().mean(-2, keepdim=True).expand_as(out)
        torch.testing.assert_close(out.double(), mean, rtol=1e-2, atol=2e-3)
        score = query[0, 0, 0].double() @ key[0, 0, 0].double() / head_dim**0.5
        torch.testing.assert_close(
            lse.double(), torch.full_like(lse, score).double(), rtol=1e-5, atol=6
        )


@pytest.mark.parametrize("jump", [3.0, 6.0, 12.0, 30.0, 90.0, 1000.0])
def test_maximum_that_moves(device, jump):
    """The largest score of a row rises from tile to tile, in either direction or up and down, by
    amounts below and above what float16 weights could hold without a new maximum."""
    tile = torch.arange(512) // 64
    for steps in (tile, 7 - tile, (tile * 5) % 8, (tile % 2) * 4):
        logits = jump * steps
        key = (logits / 8)[:, None] + 0.01 * torch.randn(512, 64)
        query = torch.ones(1, 1, 70, 64)
        # Rows that differ in sign and size, so that not all move together.
        query *= torch.linspace(-1, 1, 70)[:, None]
        for dtype in HALF:
            tensors = [x.to(dtype).to(device) for x in (query, key[None, None])]
            value = randn(1, 1, 512, 64, device=device, dtype=dtype)
            check(*tensors, value)
            check(*tensors, value, is_causal=True, bottom_right=True)
            check(*tensors, value, torch.zeros(512, dtype=dtype, device=device))


def test_one_key_above_all(device):
    """One key takes all the weight, wherever it stands: the output is its value."""
    for position in (0, 63, 64, 130, 299):
        query, key, value = qkv((2, 1), (70, 300), 64, device=device)
        query = query.abs() + 0.1
        key[:, :, position] = 60.0
        out, _ = check(query, key, value)
        assert torch.equal(out, value[:, :, position : position + 1].expand_as(out))


def test_lazily_negated_tensors(device):
    """The imaginary part of a conjugate is a view that stands for its negative."""
    dtype = torch.complex64 if device == "cpu" else torch.complex32
    parts = [torch.randn(1, 2, 40, 64, 2) for _ in range(3)]
    real = torch.float32 if device == "cpu" else torch.float16
    views = [torch.view_as_complex(x.to(real).to(device)).to(dtype).conj().imag for x in parts]
    assert all(x.is_neg() for x in views)
    for a, b in zip(forward(*views), forward(*(x.resolve_neg() for x in views)), strict=True):
        close(a, b, real)


def test_calls_from_several_threads(device):
    """No state is shared between calls."""
    cases = [
        Case(torch.float16, heads=(4, 2), seqlens=(100, 150), mask="bool-bhqk"),
        Case(torch.bfloat16, seqlens=(200, 90), head_dim=128, is_causal=True),
        Case(torch.float16, seqlens=(33, 300), head_dim=40, layout="transposed"),
    ]
    inputs = [case.build(device) for case in cases]
    right = [
        torch.ops.fa.forward(*x, **case.options) for x, case in zip(inputs, cases, strict=True)
    ]
    if device == "cuda":
        torch.cuda.synchronize()
    wrong = []

    def work(i):
        for _ in range(5):
            results = torch.ops.fa.forward(*inputs[i], **cases[i].options)
            if not all(torch.equal(a, b) for a, b in zip(results, right[i], strict=True)):
                wrong.append(cases[i].id)

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        list(pool.map(work, [0, 1, 2] * 2))  # raises what a thread raised
    assert not wrong


def test_global_settings_of_torch(device):
    """Neither the default dtype nor deterministic mode changes a result, and no random number is
    drawn."""
    tensors = qkv((2, 1), (40, 70), 64, device=device)
    mask = torch.ones(40, 70, dtype=torch.bool, device=device).tril()
    right = forward(*tensors, mask)
    state = torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state()
    try:
        torch.set_default_dtype(torch.float64)
        torch.use_deterministic_algorithms(True)
        results = torch.ops.fa.forward(*tensors, mask)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
    assert [x.dtype for x in results] == [torch.float16, torch.float32]
    assert all(torch.equal(a, b) for a, b in zip(results, right, strict=True))
    after = torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state()
    assert torch.equal(state, after)


@pytest.mark.parametrize(
    "mask_shape", [(2, 4, 30, 50), (2, 1, 1, 30), (3, 1, 30, 50), (4, 50), (1, 1, 1, 30, 50), (49,)]
)
def test_mask_that_does_not_fit(device, mask_shape):
    """A mask of another shape is refused, also where its elements would suffice."""
    tensors = qkv((2, 2), (30, 50), 64, device=device, batch=2)
    mask = torch.ones(mask_shape, dtype=torch.bool, device=device)
    with pytest.raises(RuntimeError, match=r"attn_mask: shape .*\(2, 2, 30, 50\), got"):
        torch.ops.fa.forward(*tensors, mask)


OTHER_DTYPES = (torch.float64, torch.int64, torch.uint8, torch.bfloat16)


@pytest.mark.parametrize("dtype", OTHER_DTYPES, ids=str)
def test_mask_of_another_dtype(device, dtype):
    """Integers could mean two things; another half type is a mistake more likely than not."""
    tensors = qkv((2, 2), (30, 50), 64, device=device)
    with pytest.raises(RuntimeError, match="attn_mask: dtype must be"):
        torch.ops.fa.forward(*tensors, torch.ones(30, 50, dtype=dtype, device=device))


def test_many_query_blocks(device):
    """Half a million queries and few keys."""
    check(*qkv((2, 1), (2**19 + 5, 3), 8, device=device))


def test_rows_without_keys_beside_nan_values(device):
    """A row that sees nothing is 0 even if the tile it lies in multiplies a NaN by 0."""
    query, key, value = qkv((1, 1), (40, 33), 64, device=device)
    value[:] = torch.nan
    out, lse = torch.ops.fa.forward(query, key, value, is_causal=True, bottom_right=True)
    assert not out[:, :, :7].any() and out[:, :, 7:].isnan().all()
    assert torch.equal(lse[:, :, :7], torch.full_like(lse[:, :, :7], -torch.inf))


@pytest.mark.parametrize("which", ["query", "key"])
def test_lengths_at_the_limit_of_int(device, which):
    """Expanded tensors reach any length without memory; what kernels cannot count is refused."""
    if device == "cpu":
        pytest.skip("the CPU backend counts in 64 bits")
    row = torch.randn(1, 1, 1, 64, dtype=torch.float16, device=device)
    long = row.expand(1, 1, 2**31 - 1, 64)
    with pytest.raises(RuntimeError, match=f"{which}: seqlen must be at most 2147483392, got"):
        torch.ops.fa.forward(*((long, row, row) if which == "query" else (row, long, long)))


def test_too_many_tiles(device):
    if device == "cpu":
        pytest.skip("the CPU backend has no grid")
    row = torch.randn(1, 1, 1, 1, dtype=torch.float16, device=device)
    query = row.expand(65536, 32769, 1, 1)
    with pytest.raises(RuntimeError, match=r"below 2\^31, got 65536 \* 32769 \* 1"):
        torch.ops.fa.forward(query, row.expand(65536, 1, 1, 1), row.expand(65536, 1, 1, 1))


def test_weights_below_any_number_are_zero(device):
    """A key 200 below the maximum weighs e^-200: nothing, however large its value is."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    options = {"dtype": dtype, "device": device}
    query = torch.full((1, 1, 1, 1), 100.0, **options)
    key = torch.tensor([1.0, -1.0], **options).view(1, 1, 2, 1)
    value = torch.tensor([1.0, 3e38], **options).view(1, 1, 2, 1)
    out, _ = torch.ops.fa.forward(query, key, value)
    assert out.item() == 1
