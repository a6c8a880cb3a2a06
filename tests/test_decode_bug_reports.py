"""Bug reports against the decoding of other attention libraries, as inputs of ours. Of those that
need no cache, tests/test_bug_reports.py has the forward."""

import math

import pytest
import torch
from cases import HALF
from kv_caches import Cache, forward_kvcache, int32, randn, run
from reference import close

from flashattn_ext import flash_attn_with_kvcache, merge_states


@pytest.mark.parametrize(
    ("lengths", "capacity", "heads", "dtype"),
    [
        ([1, 3], 3, (1, 1), torch.float16),
        ([32, 64, 96, 48], 128, (8, 8), torch.bfloat16),
    ],
    ids=["3 slots", "128 slots"],
)
def test_r11_free_slots_hold_nan(device, lengths, capacity, heads, dtype):
    """FA#1745, FA#2374: keys and values behind a length were multiplied by 0, and were NaN."""
    cache = Cache(device, lengths, capacity, heads[1], 64, dtype)
    query = randn(len(lengths), 1, heads[0], 64, device=device, dtype=dtype)
    cache.check(query, *run(query, cache))


@pytest.mark.parametrize("seqlen_q", [1, 9, 107])
def test_r12_page_that_is_filled_in_part(device, seqlen_q):
    """FA#1974: 107 tokens in a page of 256, NaN bits in the rest of it."""
    cache = Cache(device, [107], 256, 8, 128, page_size=256)
    query = randn(1, seqlen_q, 32, 128, device=device)
    cache.check(query, *run(query, cache, is_causal=True), is_causal=True)


@pytest.mark.parametrize("heads", [(5, 1), (6, 1), (28, 4), (24, 4), (64, 4)], ids=str)
@pytest.mark.parametrize("page_size", [None, 16])
def test_r47_groups_of_any_size(device, heads, page_size):
    """FI#996, FI#2684, FI#3563: only groups of 1, 2, 3, 4 and 8 heads were built."""
    cache = Cache(device, [600, 41], 640, heads[1], 128, page_size=page_size)
    query = randn(2, 1, heads[0], 128, device=device)
    cache.check(query, *run(query, cache))


def test_r76_cache_on_another_device():
    """FI#452, FI#924: 2048 keys, 32 heads of 128 on cuda:1 was an illegal access."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    cache = Cache("cuda:1", [2048, 1000], 2048, 32, 128, torch.float16, page_size=64)
    query = randn(2, 1, 32, 128, device="cuda:1", dtype=torch.float16)
    with torch.cuda.device(0):
        cache.check(query, *run(query, cache))


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_r86_any_number_of_splits(device, dtype):
    """FA#1647: 16 and 32 splits differed beyond rounding in the heads after the first."""
    cache = Cache(device, [4096], 4096, 8, 128, dtype)
    query = randn(1, 1, 16, 128, device=device, dtype=dtype)
    for num_splits in (1, 2, 3, 4, 16, 32):
        out, lse = run(query, cache, num_splits=num_splits)
        cache.check(query, out, lse, f"{num_splits} splits")


@pytest.mark.parametrize("num_splits", [2, 4, 5])
def test_r88_lengths_pages_and_splits_at_once(device, num_splits):
    """FA#1217: sequences of several lengths, from pages, in more than one split."""
    cache = Cache(device, [1, 1000, 333, 0, 64], 1024, 2, 64, page_size=16)
    query = randn(5, 3, 8, 64, device=device)
    out, lse = run(query, cache, is_causal=True, num_splits=num_splits)
    cache.check(query, out, lse, is_causal=True)


@pytest.mark.parametrize(
    ("heads", "head_dim", "seqlen_q"), [((32, 8), 128, 1), ((14, 2), 64, 9), ((14, 2), 64, 10)]
)
def test_r90_neighbours_change_nothing(device, heads, head_dim, seqlen_q):
    """FA#1570, VL#51902: a neighbour in the batch got 100 keys shorter, and the bits of others
    changed."""
    cache = Cache(device, [2000, 1900, 700, 2048], 2048, heads[1], head_dim)
    query = randn(4, seqlen_q, heads[0], head_dim, device=device)
    for batch_invariant in (False, True):
        options = {"is_causal": True, "batch_invariant": batch_invariant}
        cache.lengths = int32(cache.seqlens, device)
        before = run(query, cache, **options)
        cache.lengths = int32([2000, 1900, 600, 2048], device)
        after = run(query, cache, **options)
        for a, b in zip(before, after, strict=True):
            assert torch.equal(a[[0, 1, 3]], b[[0, 1, 3]])
        assert not torch.equal(before[0][2], after[0][2])


def test_r109_lse_of_a_prefix_merges(device):
    """FI#2113, SG#35045, PT#181645: the LSE of a prefix of 4096 keys was in base 2."""
    whole = Cache(device, [4096 + 256], 4096 + 256, 2, 64)
    query = randn(1, 1, 8, 64, device=device)
    prefix = forward_kvcache(query, whole.key[:, :4096], whole.value[:, :4096])
    chunk = forward_kvcache(query, whole.key[:, 4096:], whole.value[:, 4096:])
    whole.check(query, *merge_states(*prefix, *chunk))


def test_r15_r21_r24_few_keys_and_the_corner(device):
    """SA#19: fewer keys than a tile; PT#108108, SA#372: of 5 keys the last query sees all, the one
    before it 4."""
    for keys in (1, 2, 5, 63, 127):
        cache = Cache(device, [keys], keys, 16, 64)
        for seqlen_q in (1, 2):
            query = randn(1, seqlen_q, 16, 64, device=device)
            out, lse = run(query, cache, is_causal=True)
            cache.check(query, out, lse, f"{keys} keys", is_causal=True)
    one = torch.zeros(1, 2, 1, 64, dtype=torch.half, device=device)
    keys = torch.zeros(1, 5, 1, 64, dtype=torch.half, device=device)
    _, lse = flash_attn_with_kvcache(one, keys, keys, causal=True, return_softmax_lse=True)
    close(lse, torch.tensor([[[math.log(4), math.log(5)]]], device=device), torch.float16)
