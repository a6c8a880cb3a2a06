"""Lengths and pages of fa::forward_kvcache that only the device knows.

CUDA graphs with others in each replay, kernels that write them just before, and numbers that nobody
has checked.
"""

import math

import pytest
import torch
from kv_caches import Cache, captured, forward_kvcache, int32, randn, run


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_cuda_graph(device, batch_invariant):
    """A captured decoding step is replayed with other lengths, pages and numbers."""
    if device != "cuda":
        pytest.skip("CUDA graphs need a GPU")
    heads_k, page_size = 2, 16
    first = Cache(device, [100, 5, 0], 512, heads_k, 64, page_size=page_size)
    key, value, table = first.key.clone(), first.value.clone(), first.table.clone()
    lengths = first.lengths.clone()
    query = randn(3, 2, 8, 64, device=device)
    rows = [randn(3, 2, heads_k, 64, device=device) for _ in range(2)]
    table[:] = torch.arange(table.numel(), device=device).view_as(table)

    def step():
        return forward_kvcache(
            query,
            key,
            value,
            lengths,
            table,
            *rows,
            is_causal=True,
            batch_invariant=batch_invariant,
        )

    graph, (out, lse) = captured(step)
    for seqlens in ([100, 5, 0], [400, 510, 33], [0, 0, 1]):
        after = [n + 2 for n in seqlens]
        now = Cache(device, after, 512, heads_k, 64, page_size=page_size)
        query.copy_(randn(3, 2, 8, 64, device=device))
        for pool, source in ((key, now.key), (value, now.value)):
            pool.copy_(source)
        table.copy_(now.table)
        lengths.copy_(int32(seqlens, device))
        for new, dense in zip(rows, now.dense, strict=True):
            for b, n in enumerate(seqlens):
                new[b] = dense[b, n : n + 2]
        for b, n in enumerate(seqlens):
            for i in (n, n + 1):
                at = table[b, i // page_size], i % page_size
                key[at] = value[at] = torch.nan
        graph.replay()
        now.check(query, out, lse, f"replayed with {seqlens}", is_causal=True)


# Queries of a sequence, splits, page size, head_dim, scale, capacity and sequences: every decoding
# kernel, alone and in a cluster; Q that is changed before it is used, rows that are copied element
# by element, and more pages than shared memory holds, of a sequence and of a split.
WRITTEN_BEFORE = [
    (1, 1, None, 128, None, 320, 3),
    (1, 1, 16, 128, None, 320, 3),
    (1, 4, None, 128, None, 320, 3),
    (1, 4, 64, 128, None, 320, 3),
    (4, 9, 16, 128, None, 320, 3),
    (20, 1, None, 128, None, 320, 3),
    (20, 1, 16, 64, None, 320, 3),
    (6, 2, 16, 128, None, 320, 3),
    (12, 1, 16, 64, None, 320, 3),
    (20, 3, 64, 128, None, 320, 3),
    (1, 2, 16, 128, -0.1, 320, 3),
    (3, 2, 16, 256, -0.1, 320, 3),
    (2, 2, 16, 20, None, 320, 3),
    (1, 1, 16, 64, None, 15872, 1),
    (1, 2, 16, 64, None, 15872, 1),
    (20, 1, 16, 64, None, 15872, 1),
    (20, 2, 16, 64, None, 15872, 1),
]


@pytest.mark.parametrize("case", WRITTEN_BEFORE, ids=str)
def test_lengths_and_pages_that_the_kernel_before_writes(device, case):
    """A kernel that still runs while the next one starts on other multiprocessors: what that finds
    there at first is what the replay before has left."""
    if device != "cuda":
        pytest.skip("on the CPU there is no other kernel")
    seqlen_q, num_splits, page_size, head_dim, scale, capacity, sequences = case
    pages = 0 if page_size is None else capacity // page_size
    count = sequences * (1 + pages)
    # Attention whose result is the value of its last key, bit for bit, late: lengths and pages.
    heads, slow_keys = math.ceil(count / 64), 30000 if count <= 64 else 6000
    half = {"dtype": torch.float16, "device": device}
    slow_query = torch.ones(1, 1, heads, 128, **half)
    slow_key = torch.full((1, slow_keys, 1, 128), -1.0, **half).repeat(1, 1, heads, 1)
    slow_key[:, -1] = 1.0
    slow_value = torch.randn(1, slow_keys, heads, 128, **half)
    query = randn(sequences, seqlen_q, 8, head_dim, device=device)
    first = Cache(device, [0] * sequences, capacity, 2, head_dim, page_size=page_size)
    key, value = first.key.clone(), first.value.clone()

    def step():
        written, _ = forward_kvcache(slow_query, slow_key, slow_value, num_splits=1, scale=10.0)
        numbers = written.view(-1).view(torch.int32)
        table = None
        if page_size is not None:
            table = numbers[sequences:count].view(sequences, pages)
        lengths = numbers[:sequences]
        options = {"num_splits": num_splits, "scale": scale}
        return numbers, *forward_kvcache(query, key, value, lengths, table, **options)

    graph, (numbers, out, lse) = captured(step)
    everything = [capacity] * sequences
    for seqlens in (everything, [0] * sequences, None, everything, None, None):
        seqlens = seqlens or torch.randint(0, capacity + 1, (sequences,)).tolist()
        now = Cache(device, seqlens, capacity, 2, head_dim, page_size=page_size)
        key.copy_(now.key)
        value.copy_(now.value)
        wanted = torch.zeros_like(numbers)
        wanted[:sequences] = now.lengths
        if page_size is not None:
            # Behind the length nothing is asked for; halves of floats could not hold what is there.
            wanted[sequences:count] = now.table.clamp(min=0).view(-1)
        slow_value[0, -1] = wanted.view(torch.float16).view(heads, 128)
        graph.replay()
        assert torch.equal(numbers, wanted)
        now.check(query, out, lse, f"replayed with {seqlens}", scale=scale)


def test_pages_that_do_not_exist(device):
    """Nobody reads the table on the host, so no entry may lead out of the cache; what a sequence
    with such an entry gets is not defined, and the others are what they were."""
    if device != "cuda":
        pytest.skip("on the CPU pages are checked")
    for seqlen_q in (1, 20):
        cache = Cache(device, [100, 64, 33], 128, 2, 64, page_size=16)
        query = randn(3, seqlen_q, 8, 64, device=device)
        out, lse = run(query, cache)
        cache.table[1, :4] = int32([2**31 - 1, -1, -(2**31), cache.key.shape[0]], device)
        again, lse_again = run(query, cache)
        for b in (0, 2):
            assert torch.equal(again[b], out[b]) and torch.equal(lse_again[b], lse[b])
        # The last key of each sequence, written once more.
        rows = [
            torch.stack([dense[b, n - 1] for b, n in enumerate(cache.seqlens)])[:, None]
            for dense in cache.dense
        ]
        lengths = cache.lengths - 1
        again, _ = forward_kvcache(query, cache.key, cache.value, lengths, cache.table, *rows)
        for b in (0, 2):
            assert torch.equal(again[b], out[b])


# Heads, queries, head_dim, page size, keys, splits and window_left: more pages than shared memory
# holds, in every decoding kernel; splits and windows that start in the middle of the table, pages
# that are larger than a tile. Without splits, heads count times the multiprocessors: so many that
# nobody splits, and the small kernels take them.
MANY_PAGES = [
    (2, 1, 128, 16, 20790, 1, -1),
    (2, 1, 256, 16, 20790, 1, -1),
    (2, 20, 128, 16, 20790, 1, -1),
    (2, 20, 64, 16, 20790, 1, -1),
    (2, 40, 64, 16, 20790, 1, -1),
    (2, 80, 128, 16, 20790, 1, -1),
    (2, 1, 128, 16, 20790, 2, -1),
    (2, 80, 128, 16, 20790, 2, -1),
    (2, 1, 128, 16, 20790, 1, 12000),
    (2, 40, 64, 16, 20790, 1, 12000),
    (1, 1, 128, 256, 131684, 1, -1),
    (1, 40, 128, 256, 131684, 1, -1),
    (6, 1, 64, 16, 20790, None, -1),
    (6, 1, 256, 16, 20790, None, -1),
    (6, 20, 128, 16, 20790, None, -1),
]


@pytest.mark.parametrize("case", MANY_PAGES, ids=str)
def test_more_pages_than_a_cta_keeps(device, case):
    """The numbers of its pages pass through shared memory in parts."""
    if device != "cuda":
        pytest.skip("a matter of the kernels for GPUs")
    heads, seqlen_q, head_dim, page_size, keys, splits, window_left = case
    if splits is None:
        heads *= torch.cuda.get_device_properties(0).multi_processor_count
    cache = Cache(
        device, [keys], -(-keys // page_size) * page_size, 1, head_dim, page_size=page_size
    )
    query = randn(1, seqlen_q, heads, head_dim, device=device)
    options = {"is_causal": True, "window_left": window_left, "num_splits": splits or 0}

    def call(key, value, table):
        key, value = (t.expand(-1, -1, heads, -1) for t in (key, value))
        return forward_kvcache(query, key, value, cache.lengths, table, **options)

    out, lse = call(cache.key, cache.value, cache.table)
    expected = call(*cache.dense, None)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    first = query[:, :, :2], out[:, :, :2].contiguous(), lse[:, :2]
    cache.check(*first, is_causal=True, window_left=window_left)


def test_lengths_that_do_not_fit_are_clamped(device):
    """Nobody reads lengths on the host, so no length may lead out of the cache."""
    if device != "cuda":
        pytest.skip("on the CPU lengths are checked")
    cache = Cache(device, [64, 0], 64, 2, 64)
    query = randn(2, 1, 4, 64, device=device)
    expected = run(query, cache)
    cache.lengths = int32([2**31 - 1, -5], device)
    assert all(torch.equal(a, b) for a, b in zip(run(query, cache), expected, strict=True))
    key, value = cache.key.clone(), cache.value.clone()
    rows = [randn(2, 3, 2, 64, device=device) for _ in range(2)]
    forward_kvcache(query, key, value, int32([63, -1], device), None, *rows)
    assert torch.equal(key[0, :63], cache.key[0, :63]) and torch.equal(key[0, 63], rows[0][0, 0])
    assert torch.equal(key[1, :2], rows[0][1, 1:]) and key[1, 2:].isnan().all()
