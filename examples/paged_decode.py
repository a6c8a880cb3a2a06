"""Serving from a paged KV cache: requests of different lengths share a pool of pages.

One attention layer with random projections stands in for a model. Requests arrive, have their
prompt written to the cache (prefill), get one token a step together with all others that run
(decode), and give their pages back when they have finished. In the end every output is compared
with plain causal attention over the whole request. On a GPU the decoding step is one CUDA graph:
lengths and page tables are tensors, which is all that changes from step to step.

Runs on the GPU if there is one, else on the CPU (or where --device says); needs nothing but torch.
"""

import argparse
import time
import warnings
from dataclasses import dataclass, field

warnings.filterwarnings("ignore", "Failed to initialize NumPy")

import torch  # noqa: E402

import flashattn_ext  # noqa: E402

HEADS, KV_HEADS, HEAD_DIM = 16, 8, 128  # Qwen3-0.6B
PAGE_SIZE = 16
SLOTS = 4  # requests that run at once


class PagedCache:
    """A pool of pages, and which of them each running request has."""

    def __init__(self, pages, pages_per_request, device, dtype):
        shape = (pages, PAGE_SIZE, KV_HEADS, HEAD_DIM)
        self.keys = torch.empty(shape, device=device, dtype=dtype)
        self.values = torch.empty(shape, device=device, dtype=dtype)
        # An idle slot has length 0. It is given page 0, which no request gets, so that the token
        # that the step appends to every slot does no harm.
        self.table = torch.zeros(SLOTS, pages_per_request, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(SLOTS, dtype=torch.int32, device=device)
        self.free = list(range(1, pages))
        self.owned = [[] for _ in range(SLOTS)]

    def reserve(self, slot, length):
        """Gives a slot the pages that this many tokens need."""
        while len(self.owned[slot]) * PAGE_SIZE < length:
            page = self.free.pop()
            self.table[slot, len(self.owned[slot])] = page
            self.owned[slot].append(page)

    def release(self, slot):
        self.free += self.owned[slot]
        self.owned[slot] = []
        self.table[slot] = 0
        self.lengths[slot] = 0


@dataclass
class Request:
    """The projections of all its tokens, as a model would find them one by one."""

    prompt: int
    tokens: int  # prompt included
    q: torch.Tensor  # (1, tokens, HEADS, HEAD_DIM)
    k: torch.Tensor  # (1, tokens, KV_HEADS, HEAD_DIM)
    v: torch.Tensor
    outputs: list = field(default_factory=list)
    done: int = 0


def make_request(prompt, new_tokens, device, dtype):
    def randn(heads):
        shape = (1, prompt + new_tokens, heads, HEAD_DIM)
        return torch.randn(shape, device=device, dtype=dtype)

    return Request(prompt, prompt + new_tokens, randn(HEADS), randn(KV_HEADS), randn(KV_HEADS))


def prefill(cache, slot, request):
    """Writes the prompt to the cache and attends to it, causally."""
    cache.reserve(slot, request.prompt)
    q, k, v = (t[:, : request.prompt] for t in (request.q, request.k, request.v))
    out = flashattn_ext.flash_attn_with_kvcache(
        q,
        cache.keys,
        cache.values,
        k,
        v,
        cache_seqlens=cache.lengths[slot : slot + 1],
        block_table=cache.table[slot : slot + 1],
        causal=True,
    )
    cache.lengths[slot] = request.done = request.prompt
    request.outputs.append(out)


class DecodeStep:
    """One token for every slot; on a GPU, a graph that is captured once and replayed."""

    def __init__(self, cache, device, dtype):
        self.cache = cache
        self.q = torch.zeros(SLOTS, 1, HEADS, HEAD_DIM, device=device, dtype=dtype)
        self.k, self.v = (
            torch.zeros(SLOTS, 1, KV_HEADS, HEAD_DIM, device=device, dtype=dtype) for _ in range(2)
        )
        self.graph = None
        if device.type == "cuda":
            self.attend()  # kernels are loaded before they are captured
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.out = self.attend()

    def attend(self):
        return flashattn_ext.flash_attn_with_kvcache(
            self.q,
            self.cache.keys,
            self.cache.values,
            self.k,
            self.v,
            cache_seqlens=self.cache.lengths,
            block_table=self.cache.table,
        )

    def run(self, running):
        """`running`: the request of each busy slot."""
        for slot, request in running.items():
            self.cache.reserve(slot, request.done + 1)
            for target, source in ((self.q, request.q), (self.k, request.k), (self.v, request.v)):
                target[slot] = source[0, request.done]
        if self.graph is not None:
            self.graph.replay()
        else:
            self.out = self.attend()
        for slot, request in running.items():
            request.outputs.append(self.out[slot : slot + 1].clone())
            request.done += 1
            self.cache.lengths[slot] += 1


def serve(requests, cache, step):
    """Runs all requests, as many at once as there are slots. Returns the number of steps."""
    waiting, running, steps = list(requests), {}, 0
    while waiting or running:
        for slot in range(SLOTS):
            if slot not in running and waiting:
                running[slot] = waiting.pop(0)
                prefill(cache, slot, running[slot])
        step.run(running)
        steps += 1
        for slot, request in list(running.items()):
            if request.done == request.tokens:
                cache.release(slot)
                del running[slot]
    return steps


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", help="cuda or cpu; the GPU if there is one")
    parser.add_argument("--new-tokens", type=int, default=32)
    args = parser.parse_args()
    if args.new_tokens < 1:
        parser.error(f"--new-tokens: must be at least 1, got {args.new_tokens}")
    on_gpu = torch.cuda.is_available() and flashattn_ext.build_info()["with_cuda"]
    device = torch.device(args.device or ("cuda" if on_gpu else "cpu"))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)

    prompts = [200, 17, 64, 1, 130, 33, 90]
    requests = [make_request(n, args.new_tokens + i, device, dtype) for i, n in enumerate(prompts)]
    pages_each = [-(-request.tokens // PAGE_SIZE) for request in requests]
    pages = 1 + sum(sorted(pages_each)[-SLOTS:])
    cache = PagedCache(pages, max(pages_each), device, dtype)
    step = DecodeStep(cache, device, dtype)

    start = time.perf_counter()
    steps = serve(requests, cache, step)
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    print(f"{len(requests)} requests of {', '.join(str(r.tokens) for r in requests)} tokens")
    print(f"{pages - 1} pages of {PAGE_SIZE}, {SLOTS} slots: {steps} steps in {seconds:.2f} s")
    assert len(cache.free) == pages - 1

    largest = 0.0
    for request in requests:
        expected = flashattn_ext.flash_attn_func(request.q, request.k, request.v, causal=True)
        difference = torch.cat(request.outputs, dim=1) - expected
        largest = max(largest, difference.abs().max().item())
    print(f"largest difference from attention over whole requests: {largest:.1e}")


if __name__ == "__main__":
    main()
