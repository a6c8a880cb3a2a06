"""Inputs that broke other attention libraries: one test for each report.

The docstrings name the reports on the public trackers of PyTorch (PT), flash-attention (FA),
xformers (XF), FlashInfer (FI), SageAttention (SA), transformers (TF), vLLM (VL), TransformerEngine
(TE), TRL (TRL), diffusers (DF), optimum (OPT) and ComfyUI (CU), what was put in and what went
wrong. The right answer is that of the schema in csrc/ops/library.cpp. Numbers that are missing are
about backward (test_backward_bug_reports.py), decoding and paged caches
(test_decode_bug_reports.py), packed sequences (test_varlen_contract.py) or installing.

Reports in float32 run in the half types on a GPU, where the kernels have no others.

One file, though above 700 lines: a report is looked up by its number.
"""

import math

import pytest
import torch
from cases import DTYPES, HALF, Case, embed, qkv, randn, to_device
from reference import attention_ref, check, close, forward

import flashattn_ext

only_cuda = pytest.mark.parametrize("device", ["cuda"], indirect=True)


def reserve(elements, dtype, device):
    """Uninitialised memory, little of which will be touched; skips where there is not enough."""
    try:
        return torch.empty(elements, dtype=dtype, device=device)
    except RuntimeError as error:
        pytest.skip(f"no room for {elements} elements: {str(error).splitlines()[0]}")


@pytest.fixture
def dirty_shared_memory(device):
    """A function that leaves NaN in the shared memory of every SM of a GPU."""

    def dirty():
        if device == "cuda":
            for dtype in HALF:
                # Products and attention of NaN: their tiles take most of the shared memory, and
                # there are many times more CTAs than SMs.
                x = torch.full((4096, 4096), torch.nan, dtype=dtype, device=device)
                assert (x @ x).isnan().all()
                for head_dim in (64, 128, 256):
                    y = x.view(-1)[: 2**22].view(4, -1, 4096, head_dim).contiguous()
                    with torch.nn.attention.sdpa_kernel(
                        torch.nn.attention.SDPBackend.FLASH_ATTENTION
                    ):
                        torch.nn.functional.scaled_dot_product_attention(y, y, y)

    return dirty


# Rows and keys that are hidden


def test_r01_rows_without_keys(device):
    """PT#103963, PT#133882: a bool mask that allows nothing in some rows gave NaN there."""
    mask = torch.zeros(8, 8, dtype=torch.bool, device=device)
    mask[:4, :4] = True
    for dtype in DTYPES[device]:
        out, lse = check(*qkv((1, 1), (8, 8), 8, device=device, dtype=dtype), mask)
        assert not out[:, :, 4:].any() and out[:, :, :4].any()
        assert (lse[:, :, 4:] == -torch.inf).all()


def test_r02_a_row_of_the_lowest_number_is_a_mean(device):
    """PT#110213: float32, lengths 3, head_dim 4, one mask row full of the lowest finite number."""
    for dtype in DTYPES[device]:
        for mask_dtype in {dtype, torch.float32}:
            tensors = qkv((1, 1), (3, 3), 4, device=device, dtype=dtype)
            mask = torch.zeros(3, 3, dtype=mask_dtype, device=device)
            mask[1] = torch.finfo(mask_dtype).min
            out, _ = check(*tensors, mask)
            if mask_dtype != torch.float16:  # 65504 leaves the scores some digits
                close(out[0, 0, 1].double(), tensors[2][0, 0].double().mean(dim=0), dtype)


def test_r03_lowest_number_in_leading_columns_and_whole_rows(device):
    """PT#109517: 12 heads, 441 queries and keys, dense float mask; NaN in one backend."""
    for dtype in DTYPES[device]:
        tensors = qkv((12, 12), (441, 441), 64, device=device, dtype=dtype)
        mask = torch.zeros(1, 1, 441, 441, dtype=dtype, device=device)
        mask[..., :300] = torch.finfo(dtype).min
        mask[:, :, 7:90] = torch.finfo(dtype).min
        out, lse = check(*tensors, mask)
        assert out.isfinite().all() and lse.isfinite().all()


def test_r04_documents_packed_by_an_additive_mask(device):
    """XF#722: a dense bias of -inf outside the documents, so that rows keep keys while whole tiles
    have none, gave NaN in training."""
    lengths = (100, 200, 7, 206)
    total = sum(lengths)
    document = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    hidden = document[:, None] != document[None, :]
    for dtype in DTYPES[device]:
        tensors = qkv((4, 2), (total, total), 64, device=device, dtype=dtype)
        mask = torch.zeros(total, total, dtype=dtype).masked_fill(hidden, -torch.inf).to(device)
        out, _ = check(*tensors, mask, is_causal=True)
        start = 0
        for length in lengths:
            part = [x[:, :, start : start + length] for x in tensors]
            alone, _ = check(*part, is_causal=True)
            close(out[:, :, start : start + length].double(), alone.double(), dtype)
            start += length


def test_r08_lse_of_rows_above_the_diagonal(device):
    """FI#4452: bottom-right causal with more queries than keys gave 0 with a finite LSE."""
    for seqlens in ((9, 4), (300, 170)):
        tensors = qkv((4, 2), seqlens, 64, device=device)
        out, lse = check(*tensors, is_causal=True, bottom_right=True)
        empty = seqlens[0] - seqlens[1]
        assert (lse[:, :, :empty] == -torch.inf).all() and not out[:, :, :empty].any()
        assert lse[:, :, empty:].isfinite().all()


@pytest.mark.parametrize("hide", ["bool", "own", "f32", "causal", "window"])
def test_r10_nan_in_a_hidden_key(device, hide):
    """PT#101967: one NaN in a key that the mask hides made every row NaN. A hidden key is hidden
    whatever is in it."""
    for dtype in DTYPES[device]:
        query, key, value = qkv((2, 1), (70, 70), 64, device=device, dtype=dtype)
        visible = torch.ones(70, 70, dtype=torch.bool, device=device)
        options, mask = {}, None
        if hide in ("bool", "own", "f32"):
            visible[:, 33] = False
            mask = visible
        elif hide == "causal":
            visible = visible.tril()
            options = {"is_causal": True}
        else:
            visible = visible.tril(2).triu(-2)
            options = {"window_left": 2, "window_right": 2}
        if hide in ("own", "f32"):
            mask = torch.zeros(70, 70, dtype=dtype if hide == "own" else torch.float32)
            mask = mask.to(device).masked_fill(~visible, -torch.inf)
        clean = forward(query, key, value, mask, **options)
        for poison in (torch.nan, torch.inf, -torch.inf):
            bad_key = key.clone()
            bad_key[:, :, 33, 5] = poison
            bad = forward(query, bad_key, value, mask, **options)
            unseen = ~visible[:, 33]
            for a, b in zip(clean, bad, strict=True):
                if mask is None:
                    # Rows that see the key stand in the same tile, and may change its rounding.
                    close(a[:, :, unseen], b[:, :, unseen], dtype)
                else:
                    assert torch.equal(a, b), poison
            if math.isnan(poison) and hide in ("causal", "window"):
                assert bad[0][:, :, ~unseen].isnan().all()


def test_r21_causal_of_unequal_lengths_is_top_left(device):
    """PT#108108, PT#115111, PT#110144: with one query and five keys only key 0 is visible."""
    for seqlen_q in (1, 2):
        query, key, value = qkv((2, 2), (seqlen_q, 5), 64, device=device)
        out, _ = check(query, key, value, is_causal=True)
        assert torch.equal(out[:, :, 0], value[:, :, 0])
        out, _ = check(query, key, value, is_causal=True, bottom_right=True)
        everything, _ = check(query, key, value)
        close(out[:, :, -1], everything[:, :, -1], torch.float16)


def test_r22_causal_with_more_queries_than_keys(device):
    """FA#1778: 2048 queries, 1024 keys: half of the rows are 0 at the bottom-right corner, none at
    the top-left one."""
    n = 1024 if device == "cuda" else 128
    tensors = qkv((2, 2), (2 * n, n), 64, device=device, dtype=torch.bfloat16)
    out, lse = check(*tensors, is_causal=True, bottom_right=True)
    assert not out[:, :, :n].any() and (lse[:, :, :n] == -torch.inf).all()
    assert out[:, :, n:].any(dim=-1).all()
    out, lse = check(*tensors, is_causal=True)
    assert out.any(dim=-1).all() and lse.isfinite().all()


def test_r24_prefill_in_chunks(device):
    """SA#372, SA#131: causal with fewer queries than keys saw the wrong keys. At the bottom-right
    corner, prefill in chunks is the same as prefill at once."""
    query, key, value = qkv((6, 2), (300, 300), 64, device=device)
    whole, whole_lse = check(query, key, value, is_causal=True)
    start = 0
    for end in (1, 64, 130, 131, 300):
        chunk = query[:, :, start:end], key[:, :, :end], value[:, :, :end]
        out, lse = check(*chunk, is_causal=True, bottom_right=True)
        close(out.double(), whole[:, :, start:end].double(), torch.float16)
        torch.testing.assert_close(lse, whole_lse[:, :, start:end], rtol=1e-5, atol=1e-3)
        start = end


def test_r25_nothing_is_guessed_from_the_length_of_a_cache(device):
    """TF#30437: with a static cache longer than what is filled, the mask tells what counts, and
    without one everything does."""
    filled, capacity = 37, 128
    query, key, value = qkv((4, 2), (1, capacity), 64, device=device)
    mask = (torch.arange(capacity, device=device) < filled).expand(1, 1, 1, capacity)
    out, lse = check(query, key, value, mask)
    cropped, cropped_lse = check(query, key[:, :, :filled], value[:, :, :filled])
    close(out, cropped, torch.float16)
    torch.testing.assert_close(lse, cropped_lse, rtol=1e-5, atol=1e-3)
    everything, _ = check(query, key, value)
    assert (everything - out).abs().max() > 0.1


def test_r27_one_encoding_of_an_unlimited_window(device):
    """TE#3528, FA#1116: -1 was read as an offset and -3 as unlimited, both without a word."""
    tensors = qkv((8, 8), (200, 200), 128, device=device, dtype=torch.bfloat16)
    causal = check(*tensors, is_causal=True)
    for options in ({"window_left": -1, "window_right": 0}, {"window_right": 0}):
        for is_causal in (False, True):
            for a, b in zip(causal, check(*tensors, is_causal=is_causal, **options), strict=True):
                assert torch.equal(a, b)
    for name in ("window_left", "window_right"):
        for wrong in (-2, -3):
            with pytest.raises(RuntimeError, match=f"{name}: must be -1 .* got {wrong}"):
                torch.ops.fa.forward(*tensors, **{name: wrong})


# Memory that is not part of the call


def test_r11_cache_longer_than_its_contents(device):
    """FA#1745, FA#2374: NaN in the unused slots of a cache, after 1 to 96 used ones, came through
    as probability 0 times NaN."""
    for dtype in DTYPES[device]:
        for used, capacity in ((1, 3), (3, 3), (32, 128), (64, 128), (96, 128), (48, 128)):
            query, key, value = qkv((8, 8), (1, capacity), 64, device=device, dtype=dtype, batch=2)
            key[:, :, used:] = torch.nan
            value[:, :, used:] = torch.nan
            out, _ = check(query, key[:, :, :used], value[:, :, :used])
            assert out.isfinite().all()


@pytest.mark.parametrize("is_causal", [False, True])
def test_r12_page_partly_used(device, is_causal, dirty_shared_memory):
    """FA#1974: 107 tokens in a page of 256 slots, 32 and 8 heads, head_dim 128, bfloat16."""
    query, key, value = qkv((32, 8), (107, 256), 128, device=device, dtype=torch.bfloat16)
    results = []
    for unused in (0.0, torch.nan, torch.inf):
        key[:, :, 107:] = unused
        value[:, :, 107:] = unused
        dirty_shared_memory()
        options = {"is_causal": is_causal}
        results.append(check(query, key[:, :, :107], value[:, :, :107], **options))
    for a, b in results[1:]:
        assert torch.equal(a, results[0][0]) and torch.equal(b, results[0][1])


@pytest.mark.parametrize("head_dim", [40, 64, 128, 256])
def test_r13_stale_shared_memory(device, head_dim, dirty_shared_memory):
    """FA#1395: the tail of a key tile kept the NaN of an earlier kernel."""
    for seqlen_k in (1, 33, 64, 65, 127, 129, 200):
        for dtype in HALF:
            tensors = qkv((2, 1), (70, seqlen_k), head_dim, device=device, dtype=dtype)
            for mask in (None, torch.ones(70, seqlen_k, dtype=torch.bool, device=device)):
                dirty_shared_memory()
                out, _ = check(*tensors, mask)
                assert out.isfinite().all()


def test_r44_fewer_keys_than_a_tile(device):
    """PT#160861: 64 keys in a block of 128; the rest of the block counted."""
    for seqlen_k in (1, 17, 63, 64, 65):
        tensors = [
            to_device(embed(x, margin=(0, 0, 130, 0)), device)
            for x in qkv((2, 2), (64, seqlen_k), 64, device="cpu")
        ]
        _, lse = check(*(torch.zeros_like(x) for x in tensors[:2]), tensors[2])
        torch.testing.assert_close(lse, torch.full_like(lse, math.log(seqlen_k)))
        check(*tensors)


# Numbers


def test_r06_scores_below_any_sentinel(device):
    """FI#4267, FI#4450: every product is -524288, and the masking sentinel of -5e4 won."""
    for dtype in DTYPES[device]:
        query = torch.full((1, 2, 3, 128), 64.0, dtype=dtype, device=device)
        for seqlen_k in (1, 5, 200):
            value = randn(1, 1, seqlen_k, 128, device=device, dtype=dtype)
            key = torch.full_like(value, -64.0)
            mask = torch.ones(seqlen_k, dtype=torch.bool, device=device)
            for arguments in ((), (mask,)):
                # A power of 2: with another scale, the order in which BLAS adds up shows in P.
                out, lse = check(query, key, value, *arguments, scale=1 / 16)
                expected = -524288 / 16 + math.log(seqlen_k)
                assert (lse.double() - expected).abs().max() < 0.01
                if seqlen_k == 1:
                    assert torch.equal(out, value.expand_as(out))
                close(out.double(), value.double().mean(dim=2, keepdim=True).expand_as(out), dtype)


def test_r09_nan_in_a_live_input_shows(device):
    """PT#141128: a query full of NaN gave zeros. NaN is not the same as no key."""
    for dtype in DTYPES[device]:
        tensors = qkv((4, 2), (16, 24), 8, device=device, dtype=dtype, batch=2)
        for i in range(3):
            bad = [x.clone() for x in tensors]
            bad[i][:] = torch.nan
            out, lse = check(*bad)
            assert out.isnan().all() and lse.isnan().all() == (i < 2)
        # One bad query is one bad row, one bad key spoils the rows that see it, one bad value
        # spoils its column.
        query = tensors[0].clone()
        query[1, 2, 5, 3] = torch.nan
        out, _ = check(query, *tensors[1:])
        assert out[1, 2, 5].isnan().all() and int(out.isnan().sum()) == 8
        key = tensors[1].clone()
        key[0, 1, 9, 0] = torch.nan
        out, _ = check(tensors[0], key, tensors[2], is_causal=True)
        assert out[0, 2:, 9:].isnan().all() and int(out.isnan().sum()) == 2 * 7 * 8
        value = tensors[2].clone()
        value[1, 0, 20, 6] = torch.nan
        out, _ = check(*tensors[:2], value)
        assert out[1, :2, :, 6].isnan().all() and int(out.isnan().sum()) == 2 * 16


def test_r16_scores_overflow_float16(device):
    """PT#165961, PT#162401, OPT#1100: query and key filled with 256."""
    for head_dim in (64, 256):
        query, key, value = qkv((2, 2), (70, 90), head_dim, device=device)
        out, _ = check(query.fill_(256), key.fill_(256), value)
        assert out.isfinite().all()
        close(out.double(), value.double().mean(dim=2, keepdim=True).expand_as(out), torch.float16)


def test_r17_outputs_are_accumulated_in_float32(device):
    """CU#9773: sums of many values near the top of float16 overflowed before the division."""
    query, key, value = qkv((2, 2), (70, 2000), 64, device=device)
    value = value + 1000
    out, _ = check(query, key, value)
    assert (out - 1000).abs().max() < 2


@pytest.mark.parametrize("head_dim", [64, 72, 128, 256])
def test_r18_every_element_in_its_place(device, head_dim):
    """FA#2553: single elements were written to wrong places while the norm was right. With a window
    of one key the output is the value, bit by bit, and here every element is another number."""
    for dtype in HALF:
        query, key, value = qkv((2, 2), (200, 200), head_dim, device=device, dtype=dtype)
        bits = (torch.arange(value.numel(), dtype=torch.int32) * 7919) % 0x7000
        value = bits.to(torch.int16).view(dtype).view(value.shape).to(device)
        out, _ = forward(query, key, value, window_left=0, window_right=0)
        assert torch.equal(out.view(torch.int16), value.view(torch.int16))
        mask = torch.eye(200, dtype=torch.bool, device=device).flip(1)
        out, _ = forward(query, key, value, mask)
        assert torch.equal(out.view(torch.int16), value.flip(2).view(torch.int16))


@pytest.mark.parametrize("scale", [-1.0, -0.125, 0.0])
def test_r19_scale_of_any_sign(device, scale):
    """PT#105202: the square root of a negative scale. The mask is not scaled."""
    for dtype in DTYPES[device]:
        tensors = qkv((2, 1), (70, 100), 64, device=device, dtype=dtype)
        mask = randn(70, 100, device=device, dtype=dtype)
        for attn_mask in (None, mask):
            check(*tensors, attn_mask, scale=scale)
            check(*tensors, attn_mask, scale=scale, is_causal=True)
        plus = forward(tensors[0], -tensors[1], tensors[2], mask, scale=-scale)
        minus = forward(*tensors, mask, scale=scale)
        close(minus[0].double(), plus[0].double(), dtype)


@pytest.mark.parametrize("seqlen", [704, 64, 65])
def test_r58_all_logits_about_minus_120(device, seqlen):
    """PT#196678, TRL#7181: zero-filled keys of a tail tile stand above all real ones."""
    for dtype in DTYPES[device]:
        query, key, value = Case(dtype, 1, (4, 2), (seqlen, seqlen), values="cold").build(device)[
            :3
        ]
        for mask in (None, torch.ones(seqlen, seqlen, dtype=torch.bool, device=device)):
            out, lse = check(query, key, value, mask)
            assert out.isfinite().all()
            assert (lse + 120 - math.log(seqlen)).abs().max() < 5


@pytest.mark.parametrize("seqlen_k", [33728, 2**20 + 3])
def test_r70_many_keys(device, seqlen_k):
    """XF#719: zeros with more than 32768 keys gave NaN."""
    zeros = [torch.zeros(1, 1, n, 16, dtype=torch.float16, device=device) for n in (3, seqlen_k)]
    out, lse = check(zeros[0], zeros[1], zeros[1])
    assert not out.any()
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(seqlen_k)))
    value = zeros[1] + 1
    out, _ = check(zeros[0], zeros[1], value)
    assert torch.equal(out, torch.ones_like(out))


def test_r109_lse_is_a_natural_logarithm(device):
    """FI#2113, PT#181645: a prefix of 4096 keys and a new chunk are merged by their LSEs, one of
    which was in base 2."""
    query, key, value = qkv((4, 2), (20, 4096 + 20), 64, device=device)
    whole, whole_lse = check(query, key, value, is_causal=True, bottom_right=True)
    prefix = check(query, key[:, :, :4096], value[:, :, :4096])
    chunk = check(query, key[:, :, 4096:], value[:, :, 4096:], is_causal=True)
    lses = torch.stack([prefix[1], chunk[1]])
    lse = lses.logsumexp(dim=0)
    weights = (lses - lse).exp()[..., None]
    merged = weights[0] * prefix[0].float() + weights[1] * chunk[0].float()
    torch.testing.assert_close(lse, whole_lse, rtol=1e-5, atol=1e-3)
    close(merged, whole.float(), torch.float16)


# Strides, offsets, alignment


def test_r28_views_with_a_mask(device):
    """PT#112577: 16 heads of 128, made by view and transpose, beside a mask."""
    for dtype in DTYPES[device]:
        wide = [randn(2, 50, 16 * 128, device=device, dtype=dtype) for _ in range(3)]
        views = [x.view(2, 50, 16, 128).transpose(1, 2) for x in wide]
        mask = torch.ones(50, 50, dtype=torch.bool, device=device).tril()
        out, _ = check(*views, mask)
        plain, _ = check(*(x.contiguous() for x in views), mask)
        close(out.double(), plain.double(), dtype)


def test_r31_storage_offsets(device):
    """PT#183484: query, key and value one, two and three elements into their memory."""
    for dtype in DTYPES[device]:
        for head_dim in (64, 128):
            shape = (2, 4, 64, head_dim)
            strides = torch.empty(shape).stride()
            memory = randn(3, math.prod(shape) + 8, device=device, dtype=dtype)
            for first in range(8):
                offsets = [(first + i) % 8 for i in range(3)]
                tensors = [
                    row[offset:].as_strided(shape, strides)
                    for row, offset in zip(memory, offsets, strict=True)
                ]
                check(*tensors)


def test_r32_stride_of_a_dimension_of_size_one(device):
    """PT#116333, PT#127523: head_dim 1 with a last stride of 2 was refused."""
    query = randn(1, 1, 2, 2, device=device)[..., :1]
    assert query.stride()[-1] == 1
    query = query.as_strided((1, 1, 2, 1), (77, 5, 2, 2))
    key = randn(100, device=device).as_strided((1, 1, 9, 1), (0, 0, 3, 7))
    check(query, key, key)
    wide = randn(100, device=device)
    one = [wide.as_strided((1, 1, 1, 64), (3, 9, 5, 1), i) for i in range(3)]
    check(*one)


def test_r34_width_of_a_mask(device):
    """XF#808, XF#813: a bias of 80 columns cut to 77, and 43 keys, were refused as misaligned."""
    bias = randn(3, 8, 77, 80, device=device)
    tensors = qkv((8, 8), (77, 77), 64, device=device, batch=3)
    check(*tensors, bias[..., :77])
    check(*tensors, bias[..., 3:])
    check(*qkv((8, 8), (77, 43), 64, device=device, batch=3), bias[..., 1:44])


# Shapes


def test_r15_few_keys(device):
    """SA#19: 16 heads, one query, fewer than 128 keys."""
    for seqlen_k in (1, 2, 3, 7, 8, 31, 64, 100, 127, 128, 129):
        check(*qkv((16, 16), (1, seqlen_k), 64, device=device, dtype=torch.bfloat16))


def test_r37_no_heads(device):
    """PT#141218: 0 key heads ended the process with a division by zero."""
    empty = torch.empty(2, 0, 5, 64, dtype=torch.float16, device=device)
    out, lse = forward(empty, empty, empty)
    assert out.shape == (2, 0, 5, 64) and lse.shape == (2, 0, 5)
    some = torch.empty(2, 4, 5, 64, dtype=torch.float16, device=device)
    for query, key in ((some, empty), (empty, some)):
        try:
            out, _ = forward(query, key, key)
        except RuntimeError as error:
            assert "key: heads must divide" in str(error)
        else:
            assert out.shape == query.shape and out.numel() == 0


def test_r38_empty_batch(device):
    """PT#133780, FA#1159, PT#165944: no sequences, 10 heads, 3952 queries, 16 keys."""
    tensors = qkv((10, 10), (3952, 16), 64, device=device, batch=0)
    mask = torch.ones(3952, 16, dtype=torch.bool, device=device)
    for arguments in ((), (mask,)):
        out, lse = forward(*tensors, *arguments)
        assert out.shape == (0, 10, 3952, 64) and lse.shape == (0, 10, 3952)


@pytest.mark.parametrize("dimension", ["batch", "heads", "groups"])
def test_r41_more_than_the_grid_limit(device, dimension, request):
    """PT#142228, PT#146704, XF#845: 65536 sequences or heads, of 4 tokens."""
    n = 65536
    if device == "cuda":
        request.getfixturevalue("free_gpu_memory")(16 << 30)
    batch, heads = {"batch": (n, (8, 8)), "heads": (1, (n, n)), "groups": (1, (n, n // 8))}[
        dimension
    ]
    head_dim = 64 if device == "cuda" else 4
    if device == "cpu" and dimension == "batch":
        heads = (1, 1)
    seqlens = (4, 4)
    for mask in (None, torch.ones(4, 4, dtype=torch.bool, device=device).tril()):
        check(*qkv(heads, seqlens, head_dim, device=device, batch=batch), mask)


def test_r42_head_dim_not_a_multiple_of_8(device):
    """FA#1347: refused by the raw operator. The scale comes from the true head_dim."""
    for head_dim in (1, 3, 7, 9, 31, 33, 63, 65, 100, 129, 191, 255):
        for dtype in HALF:
            tensors = qkv((2, 1), (20, 70), head_dim, device=device, dtype=dtype)
            out, _ = check(*tensors)
            explicit, _ = check(*tensors, scale=head_dim**-0.5)
            assert torch.equal(out, explicit)
    with pytest.raises(RuntimeError, match="query: head_dim must be at most 256, got 257"):
        forward(*qkv((1, 1), (2, 2), 257, device=device))


# Grouped heads


@pytest.mark.parametrize("window_left", [-1, 100])
def test_r45_causal_with_grouped_heads(device, window_left):
    """FA#2528: 8 and 2 heads, 512 tokens; the causal limit was divided by the size of the group."""
    tensors = qkv((8, 2), (512, 512), 64, device=device, dtype=torch.bfloat16)
    options = {"is_causal": True, "window_left": window_left}
    grouped = check(*tensors, **options)
    expanded = check(tensors[0], *(x.repeat_interleave(4, dim=1) for x in tensors[1:]), **options)
    for a, b in zip(grouped, expanded, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("heads", [(28, 4), (24, 4), (64, 4), (10, 2), (12, 4), (33, 3)])
def test_r47_groups_of_any_size(device, heads):
    """FI#996, FI#2684, FI#3563: groups of 5, 6, 7 and 16 were not built."""
    for seqlen_q in (1, 5):
        check(*qkv(heads, (seqlen_q, 150), 128, device=device, dtype=torch.bfloat16, batch=2))


def test_r49_large_group_is_repeatable(device):
    """XF#1392: one sequence of 129 tokens, 2 key heads for 16 query heads; NaN in half the runs."""
    for dtype in HALF:
        tensors = qkv((16, 2), (129, 129), 256, device=device, dtype=dtype)
        first = check(*tensors)
        for _ in range(30):
            for a, b in zip(first, forward(*tensors), strict=True):
                assert torch.equal(a, b)


def test_r50_long_decode(device):
    """PT#193893: 28 and 4 heads; single steps looked right and long generation went astray. Every
    step from a growing cache is the row of a prefill at once."""
    batch, steps = (64, 300) if device == "cuda" else (2, 140)
    query, key, value = qkv(
        (28, 4), (steps, steps), 128, device=device, dtype=torch.bfloat16, batch=batch
    )
    ref = attention_ref(query, key, value, is_causal=True)
    for n in range(1, steps + 1):
        out, lse = torch.ops.fa.forward(query[:, :, n - 1 : n], key[:, :, :n], value[:, :, :n])
        close(out[:, :, 0].double(), ref.out[:, :, n - 1], torch.bfloat16)
        torch.testing.assert_close(
            lse[:, :, 0].double(), ref.lse[:, :, n - 1], rtol=1e-5, atol=1e-3
        )


def test_r86_one_query_and_many_keys(device):
    """FA#1647: 16 and 8 heads, 4096 keys; heads after the first were wrong."""
    check(*qkv((16, 8), (1, 4096), 128, device=device, dtype=torch.bfloat16))
    check(*qkv((16, 8), (1, 4096), 128, device=device, dtype=torch.float16, batch=3))


@pytest.mark.parametrize(
    "heads,head_dim,seqlen_q", [((32, 8), 128, 1), ((14, 2), 64, 9), ((14, 2), 64, 10)]
)
def test_r90_neighbours_change_nothing(device, heads, head_dim, seqlen_q):
    """FA#1570, VL#51902: a neighbour in the batch got shorter, and the bits of others changed."""
    tensors = qkv(heads, (seqlen_q, 400), head_dim, device=device, dtype=torch.bfloat16, batch=4)
    mask = torch.ones(4, 1, 1, 400, dtype=torch.bool, device=device)
    before = check(*tensors, mask)
    mask[2, ..., 300:] = False
    after = check(*tensors, mask)
    for a, b in zip(before, after, strict=True):
        assert torch.equal(a[[0, 1, 3]], b[[0, 1, 3]]) and not torch.equal(a[2], b[2])


# Offsets beyond 32 bits


@pytest.mark.parametrize("dimension", ["batch", "head", "row"])
def test_r71_strides_beyond_32_bits(device, dimension):
    """FA#1311, FA#1500, FA#767: offsets past 2^31 elements. Here one stride is that large and the
    memory between is never touched."""
    batch, heads, seqlen, head_dim = 3, 3, 33, 64
    steps = {"batch": batch, "head": heads, "row": seqlen}[dimension] - 1
    stride = 2**31 // steps + 8
    small = 3 * head_dim  # query, key and value side by side
    strides = {
        "batch": (stride, seqlen * small, small, 1),
        "head": (2**20, stride, small, 1),
        "row": (heads * small, small, stride, 1),
    }[dimension]
    sizes = (batch, heads, seqlen, head_dim)
    last = sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
    assert last >= 2**31
    memory = reserve(last + small, torch.float16, device)
    views = [memory.as_strided(sizes, strides, i * head_dim) for i in range(3)]
    for view in views:
        view.copy_(randn(*sizes, device=device))
    check(*views, is_causal=True)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float16], ids=str)
def test_r66_mask_offsets_beyond_32_bits(device, dtype):
    """PT#147585, PT#150054: a mask of more than 46341 squared elements."""
    seqlen_q, seqlen_k = 70, 200
    stride = 2**31 // (seqlen_q - 1) + 1
    memory = reserve(stride * seqlen_q, dtype, device)
    mask = memory.as_strided((seqlen_q, seqlen_k), (stride, 1))
    if dtype == torch.bool:
        mask.copy_(torch.rand(seqlen_q, seqlen_k) > 0.3)
    else:
        mask.copy_(torch.randn(seqlen_q, seqlen_k))
    check(*qkv((2, 1), (seqlen_q, seqlen_k), 64, device=device), mask)


@only_cuda
@pytest.mark.full
def test_r66_square_mask(device, free_gpu_memory):
    """PT#147585: 3 heads, 53936 queries and keys, with a mask of 2.9e9 elements."""
    free_gpu_memory(24 << 30)
    n = 53936
    tensors = [torch.randn(1, 3, n, 128, device=device, dtype=torch.bfloat16) for _ in range(3)]
    mask = torch.ones(n, n, dtype=torch.bool, device=device).tril()
    out, lse = torch.ops.fa.forward(*tensors, mask)
    causal_out, causal_lse = torch.ops.fa.forward(*tensors, is_causal=True)
    close(out, causal_out, torch.bfloat16)
    torch.testing.assert_close(lse, causal_lse, rtol=1e-5, atol=1e-3)
    last = slice(n - 40, n)
    ref = attention_ref(tensors[0][:, :, last], *tensors[1:], mask[last])
    close(out[:, :, last].double(), ref.out, torch.bfloat16)


@only_cuda
@pytest.mark.full
@pytest.mark.parametrize(
    "batch,heads,seqlen,head_dim", [(28800, 16, 15, 72), (4200, 32, 128, 128), (1, 2, 2**23, 128)]
)
def test_r73_tensors_beyond_32_bits(device, batch, heads, seqlen, head_dim, free_gpu_memory):
    """FA#1311, FA#1500, FA#767, FA#2214: 2.2e9 elements, by batch and by length; and 28800 short
    sequences. Sequences, or rows, from all over give what they give alone."""
    free_gpu_memory(40 << 30)
    shape = (batch, heads, seqlen, head_dim)
    tensors = [torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(3)]
    # A window, as all pairs of 2^23 tokens would take long.
    window = {"window_left": 100, "window_right": 20}
    out, lse = torch.ops.fa.forward(*tensors, **window)
    assert out.isfinite().all() and lse.isfinite().all()
    if batch > 1:
        for b in (0, batch // 2, batch - 1):
            ref = attention_ref(*(x[b : b + 1] for x in tensors), **window)
            close(out[b : b + 1].double(), ref.out, torch.bfloat16)
    else:
        for first in (0, seqlen // 2 - 50, seqlen - 300):
            part = [x[:, :, first : first + 300] for x in tensors]
            rows = slice(0 if first == 0 else 100, 300 if first == seqlen - 300 else 280)
            ref = attention_ref(*part, **window)
            ours = out[:, :, first : first + 300][:, :, rows]
            close(ours.double(), ref.out[:, :, rows], torch.bfloat16)


# Devices, streams, graphs


@pytest.fixture
def second_gpu():
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs, got {torch.cuda.device_count()}")
    return torch.device("cuda:1")


@only_cuda
def test_r75_device_that_is_not_current(device, second_gpu):
    """FA#54: ones on cuda:1 while cuda:0 is current gave zeros."""
    ones = torch.ones(4, 32, 16, 64, dtype=torch.float16, device=second_gpu)
    with torch.cuda.device(0):
        out, lse = forward(ones, ones, ones)
    assert out.device == lse.device == second_gpu and float(out.float().sum()) == 131072


@only_cuda
def test_r76_many_keys_on_another_device(device, second_gpu):
    """FI#452, FI#924: 2048 keys, 32 heads of 128 on cuda:1 was an illegal access."""
    tensors = qkv((32, 32), (1, 2048), 128, device=second_gpu)
    with torch.cuda.device(0):
        check(*tensors)
        check(*tensors, torch.ones(1, 2048, dtype=torch.bool, device=second_gpu))


@only_cuda
def test_r78_mask_on_another_device(device, second_gpu):
    """XF#1064: beside query on cuda:1 a mask from cuda:0 is refused by name."""
    tensors = qkv((2, 2), (40, 40), 64, device=second_gpu)
    mask = torch.ones(40, 40, dtype=torch.bool).tril()
    with pytest.raises(RuntimeError, match="attn_mask: device must equal that of query"):
        forward(*tensors, mask.to("cuda:0"))
    check(*tensors, mask.to(second_gpu))


@only_cuda
@pytest.mark.parametrize("mask_kind", [None, "bool-bhqk", "own-b11k"])
def test_r81_r82_graph_replay_with_new_data(device, mask_kind):
    """FI#3904, VL#42444: a plan made outside the graph, or at the first call, was replayed. New
    values and a new mask count, also where whole tiles turn from hidden to visible."""
    case = Case(heads=(4, 2), seqlens=(200, 300), mask=mask_kind, is_causal=True)
    tensors = [x for x in case.build(device) if x is not None]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.ops.fa.forward(*tensors, is_causal=True)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = torch.ops.fa.forward(*tensors, is_causal=True)
    for _ in range(3):
        for x, new in zip(tensors, case.build(device), strict=False):
            x.copy_(new)
        if mask_kind is not None:
            tensors[3][..., 64:192] = 0  # not added, or hidden
        for x in captured:
            x.fill_(torch.nan)
        graph.replay()
        for a, b in zip(captured, check(*tensors, is_causal=True), strict=True):
            assert torch.equal(a, b)


@only_cuda
def test_r85_side_streams(device):
    """FI#1046: results depended on what ran before. The work is ordered behind the inputs' on the
    current stream, and calls on two streams do not meet."""
    cases = [Case(heads=(4, 2), seqlens=(300, 500), mask="bool-bhqk"), Case(seqlens=(900, 900))]
    inputs = [case.build(device) for case in cases]
    expected = [check(*tensors) for tensors in inputs]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    for _ in range(5):
        results = []
        for stream, tensors in zip(streams, inputs, strict=True):
            with torch.cuda.stream(stream):
                late = [x if x is None else torch.zeros_like(x) for x in tensors]
                torch.cuda._sleep(2_000_000)
                for x, y in zip(late, tensors, strict=True):
                    if x is not None:
                        x.copy_(y)
                results.append(torch.ops.fa.forward(*late))
        torch.cuda.synchronize()
        for ours, right in zip(results, expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, right, strict=True))


@only_cuda
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "offset1"])
def test_r96_no_host_synchronisation(device, layout):
    """TF#41803, DF#11957: a length fetched to the host breaks graphs."""
    case = Case(heads=(4, 2), seqlens=(200, 300), layout=layout, mask="own-b1qk", is_causal=True)
    tensors = case.build(device)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.ops.fa.forward(*tensors, is_causal=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# Compiled, and in the wrong form


def test_r35_r92_r94_compiled(device):
    """PT#121943, PT#144021, PT#141710, PT#109607, PT#139424: compiled with dynamic shapes, masks
    were refused for their strides and the default scale became NaN."""

    def attend(query, key, value, mask):
        return torch.ops.fa.forward(query, key, value, mask)

    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend="aot_eager")
    for seqlen, head_dim in ((40, 64), (77, 128)):
        tensors = qkv((4, 4), (seqlen, seqlen), head_dim, device=device, batch=2)
        dense = randn(2, 1, seqlen, seqlen, device=device)
        for mask in (None, dense, dense.expand(2, 4, seqlen, seqlen), dense.mT):
            out, lse = compiled(*tensors, mask)
            eager_out, eager_lse = check(*tensors, mask)
            assert torch.equal(out, eager_out) and torch.equal(lse, eager_lse)


def test_r95_outputs_are_new_tensors(device):
    """FA#2351: an output that is an alias of an input is refused under compile."""
    for seqlens in ((1, 1), (5, 0), (0, 5), (70, 70)):
        query, key, value = qkv((2, 2), seqlens, 64, device=device)
        pointers = {x.data_ptr() for x in (query, key, value) if x.numel()}
        for output in torch.ops.fa.forward(query, key, value, scale=0.0):
            assert output.numel() == 0 or output.data_ptr() not in pointers


@only_cuda
def test_r98_float32_names_the_argument(device):
    """FA#622: a model in float32 met a bare dtype message."""
    tensors = qkv((2, 2), (5, 5), 64, device=device, dtype=torch.float32)
    with pytest.raises(RuntimeError, match=r"query: dtype must be .*[Ff]loat"):
        torch.ops.fa.forward(*tensors)
    out = flashattn_ext.scaled_dot_product_attention(*tensors)
    assert out.dtype == torch.float32


def test_r99_autocast(device):
    """DF#14104, PT#137033: float32 tensors under autocast failed, or ran in the wrong dtype."""
    tensors = qkv((2, 2), (40, 40), 64, device=device, dtype=torch.float32)
    with torch.autocast(device, dtype=torch.bfloat16):
        out = flashattn_ext.scaled_dot_product_attention(*tensors, is_causal=True)
    assert out.dtype == torch.bfloat16
    half = [x.bfloat16() for x in tensors]
    assert torch.equal(out, forward(*half, is_causal=True)[0])


def test_r101_shape_errors_name_the_layout(device):
    """FA#1391: (batch, seqlen, heads, head_dim) given to this layout went unnoticed."""
    query = randn(2, 30, 8, 64, device=device)
    key = randn(2, 40, 2, 64, device=device)
    with pytest.raises(RuntimeError, match=r"layout is \(batch, heads, seqlen, head_dim\)"):
        torch.ops.fa.forward(query, key, key)
    with pytest.raises(RuntimeError, match=r"\(batch, heads, seqlen, head_dim\)"):
        torch.ops.fa.forward(query[0], key, key)
    with pytest.raises(RuntimeError, match=r"key: heads must divide those of query \(3\), got 2"):
        torch.ops.fa.forward(*qkv((3, 2), (5, 5), 64, device=device))


def test_r112_options_that_do_not_exist(device):
    """FA#2752, TE#2070: an attention sink on an architecture without it. What the operator does not
    do is not among its arguments, so that it cannot be ignored."""
    tensors = qkv((2, 2), (5, 5), 64, device=device)
    for name in ("sinks", "dropout_p", "softcap", "alibi_slopes"):
        with pytest.raises(RuntimeError, match=name):
            torch.ops.fa.forward(*tensors, **{name: 0.5})
