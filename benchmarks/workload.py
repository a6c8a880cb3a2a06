"""What is timed: problems, the work they take, their inputs, and the check of a result."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

# |out - ref| <= tolerance * (|ref| + rms of the row of ref), for every element: about four times
# the rounding of P and of the output, which is all that an exact method may lose.
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 1e-4}


@dataclass(frozen=True)
class Problem:
    """One forward call. `mask` is one of

    full, causal  no mask; the lower triangle from the top-left corner
    window        causal, and at most `window` keys before the query's own
    bool          a (B, 1, Sq, Sk) tensor, True = visible: causal after left padding of Sk / 8 keys
    lowest, -inf  the same as an additive mask in the inputs' dtype, hidden keys at the lowest
                  finite value or at -inf
    """

    suite: str
    name: str
    batch: int
    heads_q: int
    heads_k: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    mask: str = "full"
    dtype: torch.dtype = torch.bfloat16
    window: int = -1
    graph: bool = False  # replayed from a CUDA graph; otherwise timed eagerly
    in_l2: bool = False  # one set of inputs, as when a captured call is replayed

    @property
    def padding(self) -> int:
        return self.seqlen_k // 8 if self.mask in ("bool", "lowest", "-inf") else 0

    def label(self) -> str:
        """The problem in one line; H16/8 are 16 query heads on 8 key heads, S is Sq x Sk."""
        heads, lengths = str(self.heads_q), str(self.seqlen_q)
        if self.heads_k != self.heads_q:
            heads += f"/{self.heads_k}"
        if self.seqlen_k != self.seqlen_q:
            lengths += f"x{self.seqlen_k}"
        mask = f"window {self.window + 1}" if self.mask == "window" else self.mask
        dtype = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[self.dtype]
        shape = f"B{self.batch} H{heads} S{lengths} D{self.head_dim}"
        return f"{self.name} {shape} {mask} {dtype}" + (" in L2" if self.in_l2 else "")


def kept_pairs(
    seqlen_q: int, seqlen_k: int, left: int = -1, right: int = -1, bottom_right: bool = False
) -> int:
    """Query-key pairs that a band mask keeps: query i sees the keys from i + d - left to
    i + d + right, with d = 0 for the top-left corner and seqlen_k - seqlen_q for the bottom-right
    one; -1 is unlimited, causal is right = 0."""
    diagonal = seqlen_k - seqlen_q if bottom_right else 0
    pairs = 0
    for i in range(diagonal, diagonal + seqlen_q):
        first = 0 if left < 0 else max(0, i - left)
        last = seqlen_k - 1 if right < 0 else min(seqlen_k - 1, i + right)
        pairs += max(0, last - first + 1)
    return pairs


def useful_flops(problem: Problem) -> int:
    """4 * batch * heads_q * pairs * head_dim: both matrix products over the visible pairs only."""
    p = problem
    if p.mask == "full":
        pairs = p.seqlen_q * p.seqlen_k
    else:  # keys in the padding are seen by nobody, queries in it see nothing
        left = p.window if p.mask == "window" else -1
        pairs = kept_pairs(p.seqlen_q - p.padding, p.seqlen_k - p.padding, left, 0)
    return 4 * p.batch * p.heads_q * pairs * p.head_dim


def least_bytes(problem: Problem) -> int:
    """Query, key, value and a tensor mask read once, the output written once."""
    p = problem
    rows = p.batch * (2 * p.heads_q * p.seqlen_q + 2 * p.heads_k * p.seqlen_k)
    mask = p.batch * p.seqlen_q * p.seqlen_k if p.padding else 0
    mask_itemsize = 1 if p.mask == "bool" else p.dtype.itemsize
    return rows * p.head_dim * p.dtype.itemsize + mask * mask_itemsize


# ------------------------------------------------------------------------------------------------
# Inputs and the check of a result


@dataclass
class Inputs:
    query: Tensor  # (B, Hq, Sq, D), a view of (B, Sq, Hq, D), as a projection leaves it
    key: Tensor  # (B, Hk, Sk, D), likewise
    value: Tensor  # (B, Hk, Sk, D), likewise
    mask: Tensor | None  # (B, 1, Sq, Sk); (Sq, Sk) for a window, for who has no windows; or None


def input_sets(problem: Problem, device: torch.device) -> list[Inputs]:
    """Sets of inputs to rotate through, so that together they hold three times the L2 cache; one
    set when it is that large by itself, on the CPU, and where the problem says so. A mask is shared
    by all sets."""
    p = problem
    count = 1
    if device.type == "cuda" and not p.in_l2:
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        count = min(64, math.ceil(3 * l2_bytes / least_bytes(p)))

    def normal(seqlen: int, heads: int) -> Tensor:
        shape = (count, p.batch, seqlen, heads, p.head_dim)
        return torch.randn(shape, dtype=p.dtype, device=device).transpose(2, 3)

    query = normal(p.seqlen_q, p.heads_q)
    key, value = normal(p.seqlen_k, p.heads_k), normal(p.seqlen_k, p.heads_k)
    mask = None
    if p.mask not in ("full", "causal"):
        mask = visible(p, torch.arange(p.seqlen_q, device=device))
    if p.padding:
        mask = mask.expand(p.batch, 1, p.seqlen_q, p.seqlen_k).contiguous()
        if p.mask != "bool":
            hidden = -math.inf if p.mask == "-inf" else torch.finfo(p.dtype).min
            mask = torch.zeros_like(mask, dtype=p.dtype).masked_fill_(~mask, hidden)
    return [Inputs(query[i], key[i], value[i], mask) for i in range(count)]


def visible(problem: Problem, rows: Tensor) -> Tensor:
    """(len(rows), Sk) bool: which keys the given query rows see."""
    p = problem
    keys = torch.arange(p.seqlen_k, device=rows.device)
    if p.mask == "full":
        return torch.ones(len(rows), p.seqlen_k, dtype=torch.bool, device=rows.device)
    seen = (keys <= rows[:, None]) & (keys >= p.padding)
    if p.mask == "window":
        seen &= keys >= rows[:, None] - p.window
    return seen


@dataclass
class Reference:
    """The exact output of some query rows of every head, by torch's MATH backend in fp32. Rows are
    spread evenly over the sequence, as many as fit a gigabyte of scores; rows that see no key are
    left out, since the backends disagree about them."""

    rows: Tensor  # [rows]
    out: Tensor  # (B, Hq, rows, D) fp32

    @classmethod
    def of(cls, problem: Problem, inputs: Inputs) -> Reference:
        p = problem
        count = max(16, min(256, 2**28 // (p.batch * p.heads_q * p.seqlen_k)))
        rows = torch.linspace(0, p.seqlen_q - 1, min(count, p.seqlen_q), dtype=torch.float64)
        rows = rows.round().long().to(inputs.query.device)
        seen = visible(p, rows)
        rows, seen = rows[seen.any(1)], seen[seen.any(1)]
        with sdpa_kernel(SDPBackend.MATH):
            out = F.scaled_dot_product_attention(
                inputs.query[:, :, rows].float(),
                inputs.key.float(),
                inputs.value.float(),
                attn_mask=seen,
                enable_gqa=p.heads_q != p.heads_k,
            )
        return cls(rows, out)

    def error_share(self, out: Tensor) -> float:
        """The largest error of any element, as a share of what TOLERANCE allows; NaN if any."""
        error = (out[:, :, self.rows].float() - self.out).abs()
        rms = self.out.square().mean(-1, keepdim=True).sqrt()
        return (error / (TOLERANCE[out.dtype] * (self.out.abs() + rms))).max().item()
