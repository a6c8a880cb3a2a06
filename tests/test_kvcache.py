"""fa::forward_kvcache and its public function, sequence by sequence against the reference.

Lengths and pages that change between replays or just before a call: test_kvcache_on_device.py."""

import math

import pytest
import torch
from cases import DTYPES, HALF, to_device
from kv_caches import Cache, forward_kvcache, int32, randn, run
from reference import close

from flashattn_ext import flash_attn_func, flash_attn_with_kvcache, merge_states

HEADS = [(2, 2), (8, 1), (7, 1), (10, 2), (16, 1)]


@pytest.mark.parametrize("page_size", [None, 16, 64, 512])
@pytest.mark.parametrize("seqlen_q", [1, 3, 17])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_lengths(device, heads, seqlen_q, page_size):
    """Empty and full sequences, and whatever lies between, in one batch; NaN in every free slot."""
    for dtype in HALF if device == "cuda" else (torch.bfloat16, torch.float32):
        cache = Cache(device, [0, 1, 300, 129, 64], 300, heads[1], 64, dtype, page_size)
        query = randn(5, seqlen_q, heads[0], 64, device=device, dtype=dtype)
        for is_causal in (False, True):
            out, lse = run(query, cache, is_causal=is_causal)
            cache.check(query, out, lse, f"{dtype} causal {is_causal}", is_causal=is_causal)


@pytest.mark.parametrize("head_dim", [1, 7, 31, 64, 80, 96, 128, 160, 200, 256])
def test_head_dims(device, head_dim):
    for dtype in DTYPES[device]:
        for page_size in (None, 32):
            cache = Cache(device, [65, 200], 200, 2, head_dim, dtype, page_size)
            query = randn(2, 2, 6, head_dim, device=device, dtype=dtype)
            out, lse = run(query, cache, is_causal=True)
            cache.check(query, out, lse, f"{dtype} page {page_size}", is_causal=True)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("seqlen_q", [1, 8, 16, 33, 150])
def test_rows_of_every_tile(device, seqlen_q, head_dim):
    """Up to 8 * 150 rows for a key head: every tile, and several of the largest."""
    cache = Cache(device, [333, 150], 400, 2, head_dim)
    query = randn(2, seqlen_q, 16, head_dim, device=device)
    out, lse = run(query, cache, is_causal=True)
    cache.check(query, out, lse, is_causal=True)


@pytest.mark.parametrize(
    "window", [(0, 0), (40, 0), (40, 3), (5, -1), (-1, 2), (1000, 1000)], ids=str
)
@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("seqlen_q", [5, 20])
def test_windows(device, seqlen_q, page_size, window):
    """Keys left of the window are not looked at: their pages may have been given away."""
    left, right = window
    cache = Cache(device, [500, 35, 4], 512, 2, 64, page_size=page_size)
    if page_size is not None and left >= 0:
        for b, length in enumerate(cache.seqlens):
            cache.table[b, : max(0, length - seqlen_q - left) // page_size] = -(2**20)
    query = randn(3, seqlen_q, 8, 64, device=device)
    for is_causal in (False, True):
        options = {"is_causal": is_causal, "window_left": left, "window_right": right}
        cache.check(query, *run(query, cache, **options), **options)


def test_queries_that_see_no_key(device):
    """More queries than keys, causal: 0, and LSE -inf for a neutral merge."""
    cache = Cache(device, [3, 0], 64, 2, 64, page_size=16)
    query = randn(2, 5, 4, 64, device=device)
    out, lse = run(query, cache, is_causal=True)
    assert (out[0, :2] == 0).all() and (lse[0, :, :2] == -math.inf).all()
    assert (out[1] == 0).all() and (lse[1] == -math.inf).all()
    cache.check(query, out, lse, is_causal=True)


@pytest.mark.parametrize("scale", [-0.2, 0.0, 3.0])
def test_scales(device, scale):
    cache = Cache(device, [200, 1], 200, 2, 64)
    query = randn(2, 2, 4, 64, device=device)
    cache.check(query, *run(query, cache, scale=scale), scale=scale)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_scores_far_from_zero(device, dtype):
    """Softmax does not care: a single key gives its value exactly, with its score as LSE."""
    query = torch.full((1, 1, 2, 128), 64.0, dtype=dtype, device=device)
    key, value = -query, randn(1, 1, 2, 128, device=device, dtype=dtype)
    out, lse = forward_kvcache(query, key, value)
    assert torch.equal(out, value)
    torch.testing.assert_close(lse, torch.full_like(lse, -(64.0**2) * 128 / math.sqrt(128)))


@pytest.mark.parametrize("num_splits", [1, 2, 3, 7, 16, 33, 128, 1000])
def test_splits(device, num_splits):
    """More than there are tiles of keys, too: the empty ones do not count."""
    cache = Cache(device, [4000, 130, 0], 4096, 2, 128, page_size=64)
    query = randn(3, 1, 8, 128, device=device)
    cache.check(query, *run(query, cache, num_splits=num_splits))


def test_more_sequences_than_fit_at_once(device):
    """Several rounds of CTAs, two on a multiprocessor, with and without a window."""
    count = 4 * torch.cuda.get_device_properties(0).multi_processor_count if device == "cuda" else 9
    for dtype, head_dim, page_size in ((torch.bfloat16, 128, None), (torch.float16, 64, 16)):
        if device == "cpu":
            dtype = torch.float32
        seqlens = torch.randint(0, 151, (count // 2,)).tolist()
        cache = Cache(device, seqlens, 150, 2, head_dim, dtype, page_size)
        query = randn(count // 2, 2, 6, head_dim, device=device, dtype=dtype)
        for window_left in (-1, 40):
            out, lse = run(query, cache, is_causal=True, window_left=window_left)
            cache.check(query, out, lse, is_causal=True, window_left=window_left)


def test_without_lengths(device):
    cache = Cache(device, [256, 256], 256, 2, 64)
    query = randn(2, 1, 8, 64, device=device)
    out, lse = forward_kvcache(query, cache.key, cache.value)
    cache.check(query, out, lse)
    assert torch.equal(out, flash_attn_with_kvcache(query, cache.key, cache.value))


def test_views(device):
    """Heads before sequence, slices of larger tensors, rows that are not aligned."""
    cache = Cache(device, [100, 64], 128, 2, 64)
    query = randn(2, 3, 4, 64, device=device)
    expected, _ = run(query, cache, is_causal=True)

    def heads_first(t):
        return t.transpose(1, 2).contiguous().transpose(1, 2)

    def padded(t, left):
        wide = t.new_full((*t.shape[:3], t.shape[3] + 9), torch.nan)
        wide[..., left : left + t.shape[3]] = t
        return wide[..., left : left + t.shape[3]]

    for change in (heads_first, lambda t: padded(t, 0), lambda t: padded(t, 1)):
        key, value = change(cache.key), change(cache.value)
        for q in (query, change(query), query.mT.contiguous().mT):
            out, _ = forward_kvcache(q, key, value, cache.lengths, is_causal=True)
            close(out, expected, out.dtype)


@pytest.mark.parametrize("page_size", [None, 16, 64])
@pytest.mark.parametrize("head_dim", [64, 20])
def test_append(device, page_size, head_dim):
    """New rows land behind those that are there, take part, and nothing else changes."""
    seqlens, new = [0, 37, 123, 59], 5
    full = Cache(device, [n + new for n in seqlens], 128, 2, head_dim, page_size=page_size)
    rows = [
        torch.stack([t[b, n : n + new] for b, n in enumerate(seqlens)]).clone() for t in full.dense
    ]
    query = randn(4, new, 6, head_dim, device=device)
    expected, expected_lse = run(query, full, is_causal=True)
    full.check(query, expected, expected_lse, is_causal=True)

    key, value = full.key.clone(), full.value.clone()
    for b, n in enumerate(seqlens):
        for i in range(n, n + new):
            at = (b, i) if page_size is None else (full.table[b, i // page_size], i % page_size)
            key[at] = value[at] = 7.0
    out, lse = forward_kvcache(
        query, key, value, int32(seqlens, device), full.table, *rows, is_causal=True
    )
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
    for ours, theirs in ((key, full.key), (value, full.value)):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def test_append_one_token_at_a_time(device):
    """A decoding loop gives what attention over the whole sequence gives."""
    seqlen, prompt = 24, 9
    q, k, v = (randn(2, seqlen, h, 32, device=device) for h in (4, 2, 2))
    expected = flash_attn_func(q, k, v, causal=True)
    key, value = (torch.full((2, 32, 2, 32), torch.nan, device=device).to(q) for _ in range(2))
    steps = [(0, prompt)] + [(i, i + 1) for i in range(prompt, seqlen)]
    for begin, end in steps:
        out = flash_attn_with_kvcache(
            q[:, begin:end],
            key,
            value,
            k[:, begin:end],
            v[:, begin:end],
            cache_seqlens=begin,
            causal=True,
        )
        close(out, expected[:, begin:end], q.dtype)
    assert torch.equal(key[:, :seqlen], k) and key[:, seqlen:].isnan().all()


def test_batch_indices(device):
    """cache_batch_idx: the sequences of a batch have any rows of the cache, of any size."""
    cache = Cache(device, [100, 20, 75], 100, 2, 64)
    rows = int32([2, 0], device)
    query = randn(2, 1, 4, 64, device=device)
    out = flash_attn_with_kvcache(
        query,
        cache.key,
        cache.value,
        cache_seqlens=cache.lengths[rows.long()],
        cache_batch_idx=rows,
    )
    key, value = cache.key[rows.long()], cache.value[rows.long()]
    assert torch.equal(
        out, flash_attn_with_kvcache(query, key, value, cache_seqlens=int32([75, 100], device))
    )


def test_public_options(device):
    cache = Cache(device, [90, 90], 90, 2, 64)
    query = randn(2, 4, 4, 64, device=device)
    options = {"is_causal": True, "scale": 0.3, "window_left": 7}
    expected = forward_kvcache(query, cache.key, cache.value, **options)
    ours = flash_attn_with_kvcache(
        query,
        cache.key,
        cache.value,
        softmax_scale=0.3,
        causal=True,
        window_size=(7, -1),
        return_softmax_lse=True,
    )
    assert torch.equal(ours[0], expected[0]) and torch.equal(ours[1], expected[1])
    cache.check(query, *ours, **options)


# ---- Invariance


@pytest.mark.parametrize("heads", [(32, 8), (14, 2)], ids=str)
@pytest.mark.parametrize("seqlen_q", [1, 4])
def test_batch_invariance(device, seqlen_q, heads):
    """The bits of a sequence do not depend on its neighbours, nor on how many there are."""
    cache = Cache(device, [1000, 2000, 1900, 3, 1024, 77], 2048, heads[1], 64, page_size=64)
    query = randn(6, seqlen_q, heads[0], 64, device=device)

    def results(rows, lengths):
        return forward_kvcache(
            query[rows],
            cache.key,
            cache.value,
            int32(lengths, device),
            cache.table[rows],
            is_causal=True,
            batch_invariant=True,
        )

    out, lse = results(list(range(6)), cache.seqlens)
    cache.check(query, out, lse, is_causal=True)
    shorter = [1000, 1900, 1800, 3, 924, 7]
    for rows, lengths in (
        ([0], cache.seqlens[:1]),
        ([0, 1], cache.seqlens[:2]),
        ([3, 0, 5], [3, 1000, 77]),
        ([0, 1, 2, 3, 4, 5], shorter),
        ([0] * 64, [1000] * 64),
    ):
        again, lse_again = results(rows, lengths)
        at = rows.index(0)
        assert torch.equal(again[at], out[0]) and torch.equal(lse_again[at], lse[0]), rows


def test_repeats(device):
    cache = Cache(device, [3000, 17], 4096, 8, 128)
    query = randn(2, 1, 32, 128, device=device)
    first = run(query, cache)
    for _ in range(10):
        again = run(query, cache)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


# ---- Tracing and gradients


def test_opcheck(device):
    cache = Cache(device, [40, 64], 64, 2, 32, page_size=16)
    query = randn(2, 1, 4, 32, device=device)
    rows = [randn(2, 1, 2, 32, device=device) for _ in range(2)]
    for page in (cache.key, cache.value):
        page.nan_to_num_()  # opcheck compares caches with ==
    lengths = int32([39, 63], device)
    for arguments in (
        (query, cache.key, cache.value, lengths, cache.table, *rows, True, 0.3),
        (query, cache.key, cache.value, lengths, cache.table),
    ):
        torch.library.opcheck(forward_kvcache, arguments, {"window_left": 9})
    out, lse = randn(2, 4, 3, 8, device=device), torch.randn(2, 4, 3, device=device)
    torch.library.opcheck(torch.ops.fa.merge_states, (out, lse, out, lse))


def test_compile(device):
    """No graph break, the cache is written, and a longer one does not change the meaning."""
    cache = Cache(device, [40, 64], 65, 2, 32)
    query = randn(2, 1, 4, 32, device=device)
    rows = [randn(2, 1, 2, 32, device=device) for _ in range(2)]

    def step(key, value):
        out = flash_attn_with_kvcache(query * 1, key, value, *rows, cache_seqlens=cache.lengths)
        return out + 1

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    caches = [[t.clone() for t in cache.dense] for _ in range(2)]
    assert torch.equal(compiled(*caches[0]), step(*caches[1]))
    for ours, theirs in zip(*caches, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def test_no_gradient(device):
    cache = Cache(device, [8], 8, 2, 32)
    query = randn(1, 1, 2, 32, device=device).requires_grad_()
    out, _ = forward_kvcache(query, cache.key, cache.value)
    with pytest.raises(RuntimeError, match="forward_kvcache"):
        out.sum().backward()


def test_autograd_notices_an_append(device):
    cache = Cache(device, [8], 9, 2, 32)
    weight = torch.ones_like(cache.key).requires_grad_()
    loss = (weight * cache.key).nan_to_num(0).sum()
    query, new = (randn(1, 1, 2, 32, device=device) for _ in range(2))
    lengths = torch.tensor([8], dtype=torch.int32, device=device)
    forward_kvcache(query, cache.key, cache.value, lengths)
    before = cache.key._version, cache.value._version
    forward_kvcache(query, cache.key, cache.value, lengths, None, new, new)
    assert cache.key._version == before[0] + 1 and cache.value._version == before[1] + 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# ---- Nothing to do


@pytest.mark.parametrize("shape", [(0, 1, 4), (2, 0, 4), (2, 1, 0)], ids=str)
def test_no_queries(device, shape):
    batch, seqlen_q, heads = shape
    key = torch.zeros(batch, 8, heads // 2, 32, dtype=torch.half, device=device)
    query = torch.zeros(batch, seqlen_q, heads, 32, dtype=torch.half, device=device)
    out, lse = forward_kvcache(query, key, key.clone())
    assert out.shape == query.shape and lse.shape == (batch, heads, seqlen_q)


def test_no_capacity(device):
    query = torch.ones(2, 1, 4, 32, dtype=torch.half, device=device)
    out, lse = forward_kvcache(query, query[:, :0], query[:, :0])
    assert (out == 0).all() and (lse == -math.inf).all()
    table = torch.zeros(2, 0, dtype=torch.int32, device=device)
    out, lse = forward_kvcache(
        query, query.repeat(1, 16, 1, 1), query.repeat(1, 16, 1, 1), None, table
    )
    assert (out == 0).all() and (lse == -math.inf).all()


# ---- Merging


def test_shared_prefix(device):
    """A prefix that all sequences share, attended to once, and the rest of each of them."""
    prefix = Cache(device, [96], 96, 2, 64)
    rest = Cache(device, [10, 40], 48, 2, 64)
    query = randn(2, 1, 8, 64, device=device)
    shared = forward_kvcache(query.view(1, 2, 8, 64), prefix.key, prefix.value)
    out, lse = merge_states(
        shared[0].view(2, 1, 8, 64), shared[1].mT.reshape(2, 8, 1), *run(query, rest)
    )
    whole = Cache(device, [106, 136], 144, 2, 64)
    for ours, before, after in zip(whole.dense, prefix.dense, rest.dense, strict=True):
        ours[:, :96], ours[:, 96:] = before, after
    expected, expected_lse = run(query, whole)
    close(out, expected, out.dtype)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-4)


# ---- Wrong arguments


def arguments(device="cpu", **changes):
    given = {
        "query": torch.zeros(2, 1, 4, 32, dtype=torch.half),
        "key_cache": torch.zeros(6, 16, 2, 32, dtype=torch.half),
        "value_cache": torch.zeros(6, 16, 2, 32, dtype=torch.half),
        "seqlens_k": torch.zeros(2, dtype=torch.int32),
        "block_table": torch.zeros(2, 3, dtype=torch.int32),
        "new_key": torch.zeros(2, 1, 2, 32, dtype=torch.half),
        "new_value": torch.zeros(2, 1, 2, 32, dtype=torch.half),
    } | changes
    return {
        name: to_device(x, device) if isinstance(x, torch.Tensor) else x
        for name, x in given.items()
    }


def half(*shape):
    return torch.zeros(shape, dtype=torch.half)


WRONG = {
    "rank": ({"query": half(2, 4, 32)}, r"query: must have 4 dimensions .* got 3: \(2, 4, 32\)"),
    "cache rank": ({"key_cache": half(6, 16, 64)}, r"key_cache: must have 4 dimensions .* got 3"),
    "dtype": ({"value_cache": half(6, 16, 2, 32).float()}, "value_cache: dtype must equal"),
    "head_dim": ({"query": half(2, 1, 4, 16)}, r"key_cache: head_dim must equal .*\(16\), got 32"),
    "large head_dim": ({"query": half(2, 1, 4, 257)}, "query: head_dim must be 1 to 256, got 257"),
    "heads": ({"query": half(2, 1, 3, 32)}, r"key_cache: heads must divide .*\(3\), got 2"),
    "value": ({"value_cache": half(6, 8, 2, 32)}, r"value_cache: shape must equal .* \(6, 8, 2"),
    "batch": ({"block_table": None}, r"key_cache: batch must equal .*\(2\), got 6"),
    "strided rows": (
        {"key_cache": half(6, 16, 2, 64)[..., ::2]},
        "key_cache: the last dimension must be contiguous, got stride 2",
    ),
    "lengths dtype": (
        {"seqlens_k": torch.zeros(2, dtype=torch.int64)},
        "seqlens_k: dtype must be int32, got Long",
    ),
    "lengths": (
        {"seqlens_k": torch.zeros(3, dtype=torch.int32)},
        r"seqlens_k: must have shape \(2,\), got \(3,\)",
    ),
    "table": (
        {"block_table": torch.zeros(3, 3, dtype=torch.int32)},
        r"block_table: must have shape .* batch 2, got \(3, 3\)",
    ),
    "table dtype": ({"block_table": torch.zeros(2, 3)}, "block_table: dtype must be int32"),
    "page size": (
        {"key_cache": half(6, 24, 2, 32), "value_cache": half(6, 24, 2, 32)},
        "key_cache: page_size must be a power of two from 16 .* got 24",
    ),
    "small pages": (
        {"key_cache": half(6, 8, 2, 32), "value_cache": half(6, 8, 2, 32)},
        "key_cache: page_size must be a power of two from 16 .* got 8",
    ),
    "one of two": ({"new_value": None}, "new_value: must be given together with new_key"),
    "no lengths": ({"seqlens_k": None}, "seqlens_k: must be given with new_key, got None"),
    "new shape": ({"new_key": half(2, 1, 1, 32)}, r"new_key: must have shape .* \(2, 1, 1, 32\)"),
    "new value": ({"new_value": half(2, 2, 2, 32)}, "new_value: shape must equal that of new_key"),
    "too many": (
        {"new_key": half(2, 49, 2, 32), "new_value": half(2, 49, 2, 32)},
        "new_key: must have at most 48 keys, the capacity of the cache, got 49",
    ),
    "shared memory": (
        {"key_cache": half(1, 16, 2, 32).expand(6, -1, -1, -1)},
        "key_cache: must have memory of its own",
    ),
    "window": ({"window_left": -2}, r"window_left: must be -1 .* got -2"),
    "splits": ({"num_splits": -1}, r"num_splits: must be 0 .* got -1"),
    "invariant splits": (
        {"num_splits": 3, "batch_invariant": True},
        "num_splits: must be 0 with batch_invariant, which chooses it, got 3",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments(device, case):
    changes, message = WRONG[case]
    with pytest.raises(RuntimeError, match=message):
        forward_kvcache(**arguments(device, **changes))


def shared_memory(device):
    """Calls that would lose or mix up rows: what they change, and the error."""
    key, value = (to_device(half(2, 48, 2, 32), device) for _ in range(2))
    crossed = to_device(half(4000), device).as_strided((2, 48, 2, 32), (1536, 32, 16, 1))
    trained = to_device(half(2, 48, 2, 32), device).requires_grad_() * 1
    return {
        "one tensor": ({"value_cache": key}, "value_cache: must not share memory with key_cache"),
        "heads": ({"key_cache": crossed}, "key_cache: must have memory of its own .*1536, 32, 16"),
        "a row": ({"new_value": key[:, 5:6]}, "new_value: must not lie inside of a cache"),
        "queries": (
            {"query": value[:, 3:4].expand(-1, 2, -1, -1)},
            "query: must not lie inside of a cache",
        ),
        "gradient": ({"value_cache": trained}, "value_cache: must not require grad to append"),
    }, {"key_cache": key, "value_cache": value, "block_table": None}


@pytest.mark.parametrize("case", ["one tensor", "heads", "a row", "queries", "gradient"])
def test_appending_where_it_would_lose_something(device, case):
    cases, caches = shared_memory(device)
    changes, message = cases[case]
    call = arguments(device) | caches | changes
    call["seqlens_k"] += 7
    before = [call[name].clone() for name in ("key_cache", "value_cache")]
    with pytest.raises(RuntimeError, match=message):
        forward_kvcache(**call)
    assert torch.equal(call["key_cache"], before[0]) and torch.equal(call["value_cache"], before[1])
    # Reading from there is fine.
    if "new_value" not in changes:
        forward_kvcache(**call | {"new_key": None, "new_value": None})


@pytest.mark.parametrize("pairs", ["pages", "rows", "heads", "columns"])
def test_keys_and_values_side_by_side(device, pairs):
    """One buffer holds both, in turns: no memory is shared. Q, K and V of a step are one, too."""
    cache = Cache(device, [30, 3], 48, 2, 32, page_size=16)
    dim = ["pages", "rows", "heads", "columns"].index(pairs)  # before which the two stand
    key, value = torch.stack([cache.key, cache.value], dim).unbind(dim)
    step = randn(2, 1, 8, 32, device=device)
    query, new_key, new_value = step.split([4, 2, 2], 2)
    lengths = cache.lengths - 1
    results = [
        forward_kvcache(query, *caches, lengths, cache.table, new_key, new_value)
        for caches in ((key, value), (cache.key, cache.value))
    ]
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
    assert torch.equal(key.nan_to_num(), cache.key.nan_to_num())
    assert torch.equal(value.nan_to_num(), cache.value.nan_to_num())


@pytest.mark.parametrize("batch", [0, 2])
def test_dtypes_are_refused_before_anything_is_written(device, batch):
    key, value = torch.zeros(2, batch, 16, 2, 32, dtype=torch.int32, device=device)
    new = torch.ones(batch, 1, 2, 32, dtype=torch.int32, device=device)
    query = torch.ones(batch, 1, 4, 32, dtype=torch.int32, device=device)
    lengths = torch.zeros(batch, dtype=torch.int32, device=device)
    with pytest.raises(RuntimeError, match=r"query: dtype must be float16.* got Int"):
        forward_kvcache(query, key, value, lengths, None, new, new)
    assert not key.any() and not value.any()


def test_no_queries_see_no_pages(device):
    cache = Cache(device, [20, 30], 32, 2, 32, page_size=16)
    cache.table.fill_(-9)
    query = randn(2, 0, 4, 32, device=device)
    for window_left in (-1, 1):
        out, lse = run(query, cache, window_left=window_left)
        assert out.shape == query.shape and lse.shape == (2, 4, 0)


WRONG_NUMBERS = {
    "negative length": ({"seqlens_k": [-1, 0]}, "seqlens_k: must be 0 to 47, .* got -1 for seq"),
    "long": ({"seqlens_k": [0, 48]}, "seqlens_k: must be 0 to 47, .* got 48 for sequence 1"),
    "page": (
        {"block_table": [[0, 1, 2], [3, 6, 4]]},
        r"block_table: .* 0 to 5, got 6 at \(1, 1\)",
    ),
}


@pytest.mark.parametrize("case", WRONG_NUMBERS)
def test_wrong_numbers_on_the_cpu(case):
    changes, message = WRONG_NUMBERS[case]
    given = {"seqlens_k": [20, 20]} | changes
    call = arguments(**{n: int32(x, "cpu") for n, x in given.items()})
    call["new_key"], call["new_value"] = torch.ones(2, 2, 1, 2, 32, dtype=torch.half)
    caches = call["key_cache"].clone(), call["value_cache"].clone()
    with pytest.raises(RuntimeError, match=message):
        forward_kvcache(**call)
    torch.testing.assert_close((call["key_cache"], call["value_cache"]), caches, equal_nan=True)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"rotary_cos": torch.ones(1)}, NotImplementedError, "rotary_cos: must be None"),
        ({"cache_leftpad": torch.ones(1)}, NotImplementedError, "cache_leftpad: must be None"),
        ({"softcap": 30.0}, NotImplementedError, r"softcap: must be 0.0, got 30.0"),
        ({"alibi_slopes": torch.ones(4)}, NotImplementedError, "alibi_slopes: must be None"),
        ({"window_size": 3}, RuntimeError, "window_size: must be two integers .* got 3"),
        (
            {"cache_batch_idx": torch.ones(2), "block_table": torch.ones(2, 1)},
            RuntimeError,
            "cache_batch_idx: must be None with block_table",
        ),
        ({"cache_batch_idx": torch.ones(2, 1)}, RuntimeError, r"cache_batch_idx: .* got \(2, 1\)"),
        ({"cache_batch_idx": [0, 1]}, RuntimeError, r"cache_batch_idx: must be a tensor, got \[0"),
        ({"cache_seqlens": 2**40}, RuntimeError, "seqlens_k: must be 0 to .* got 1099511627776"),
    ],
)
def test_public_function_refuses(options, error, message):
    key = half(2, 16, 2, 32)
    with pytest.raises(error, match=message):
        flash_attn_with_kvcache(half(2, 1, 4, 32), key, key, **options)


def test_public_function_refuses_a_query_of_three_dimensions():
    """Traced as well, where no operator is asked."""
    key = half(2, 16, 2, 32)
    compiled = torch.compile(flash_attn_with_kvcache, backend="eager")
    for function in (flash_attn_with_kvcache, compiled):
        with pytest.raises(RuntimeError, match=r"query: must have 4 .* got 3: \(2, 4, 32\)"):
            function(half(2, 4, 32), key, key, cache_seqlens=3)


@pytest.mark.full
def test_cache_above_two_gib_elements(device, free_gpu_memory):
    """Offsets need 64 bits: the keys of the last sequence, and the last pages."""
    if device != "cuda":
        pytest.skip("too slow on a CPU")
    free_gpu_memory(12 << 30)
    pages, page_size, heads_k, head_dim = 2**16 + 8, 256, 1, 128
    key, value = (
        torch.zeros(pages, page_size, heads_k, head_dim, dtype=torch.half, device=device)
        for _ in range(2)
    )
    assert key.numel() > 2**31
    cache = Cache(device, [700, 300], 1024, heads_k, head_dim, torch.half)
    table = torch.arange(pages - 8, pages, dtype=torch.int32, device=device).view(2, 4)
    for pool, dense in ((key, cache.dense[0]), (value, cache.dense[1])):
        pool[pages - 8 :] = dense.view(8, page_size, heads_k, head_dim)
    query = randn(2, 1, 4, head_dim, device=device, dtype=torch.half)
    out, lse = forward_kvcache(query, key, value, cache.lengths, table)
    cache.check(query, out, lse)
    flat = [t.view(1, -1, heads_k, head_dim) for t in (key, value)]
    last = flat[0].shape[1] - 1024
    out, lse = forward_kvcache(query[:1], *flat, int32([last + 700], device), window_left=699)
    cache.seqlens = [700]
    cache.check(query[:1], out, lse)
