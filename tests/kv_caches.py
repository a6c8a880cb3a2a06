"""KV caches of known contents for the tests, and calls of fa::forward_kvcache on them."""

import math

import torch
from reference import assert_close_to_reference, attention_low, attention_ref

forward_kvcache = torch.ops.fa.forward_kvcache


def randn(*shape, device, dtype=torch.bfloat16):
    return (torch.randn(shape) + 0.5).to(dtype).to(device)


def int32(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


class Cache:
    """Keys and values of sequences of the given lengths, as dense tensors with NaN behind each
    sequence, and as the tensors that the operator takes: the same, or pages in a random order
    (`page_size`), NaN wherever no key lies, and table entries that lead nowhere."""

    def __init__(
        self, device, seqlens, capacity, heads_k, head_dim, dtype=torch.bfloat16, page_size=None
    ):
        self.seqlens = list(seqlens)
        self.lengths = int32(self.seqlens, device)
        shape = (len(self.seqlens), capacity, heads_k, head_dim)
        self.dense = [randn(*shape, device=device, dtype=dtype) for _ in range(2)]
        for tensor in self.dense:
            for b, length in enumerate(self.seqlens):
                tensor[b, length:] = torch.nan
        self.key, self.value, self.table = *self.dense, None
        if page_size is not None:
            pages = math.ceil(capacity / page_size)
            order = torch.randperm(len(self.seqlens) * pages + 3)[: len(self.seqlens) * pages]
            self.table = order.view(len(self.seqlens), pages).int()
            self.key, self.value = (self.in_pages(tensor, page_size) for tensor in self.dense)
            for b, length in enumerate(self.seqlens):
                self.table[b, math.ceil(length / page_size) :] = -(2**20)
            self.table = self.table.to(device)

    def in_pages(self, dense, page_size):
        pool = dense.new_full((self.table.numel() + 3, page_size, *dense.shape[2:]), torch.nan)
        for b, pages in enumerate(self.table.tolist()):
            for page, rows in zip(pages, dense[b].split(page_size), strict=True):
                pool[page, : len(rows)] = rows
        return pool

    def check(self, query, out, lse, case_id=None, **options):
        """Compares a result with the reference, sequence by sequence."""
        assert out.shape == query.shape and out.dtype == query.dtype and out.is_contiguous()
        assert lse.shape == (query.shape[0], query.shape[2], query.shape[1])
        for b, length in enumerate(self.seqlens):
            q = query[b : b + 1].transpose(1, 2)
            k, v = (tensor[b : b + 1, :length].transpose(1, 2) for tensor in self.dense)
            reference = attention_ref(q, k, v, bottom_right=True, **options)
            low = attention_low(q, k, v, bottom_right=True, **options)
            case = f"{case_id or ''} sequence {b} of length {length}"
            ours = out[b : b + 1].transpose(1, 2), lse[b : b + 1]
            assert_close_to_reference(*ours, reference, low, case)


def run(query, cache, *, is_causal=False, scale=None, **options):
    """The operator on a Cache, with NaN in the memory that results are likely to get."""
    stale = [torch.full_like(query, torch.nan) for _ in range(2)]
    stale += [torch.full((2**18,), torch.nan, device=query.device) for _ in range(4)]
    del stale
    return forward_kvcache(
        query,
        cache.key,
        cache.value,
        cache.lengths,
        cache.table,
        None,
        None,
        is_causal,
        scale,
        **options,
    )


def captured(step):
    """A CUDA graph of a call, and the results that its replays overwrite."""
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph, results
