"""How often the Hopper kernel has to do a key block again, modelled in plain torch.

The kernel (csrc/kernels/fwd_sm90.cu, csrc/attn/softmax.cuh) walks the key blocks of 64 query rows,
backward from the last or forward from the first. In the block that it visits first, and in every
one that the diagonal or the end of the keys cuts, each row takes the maximum of its scores. In all
others a warp exponentiates its 16 rows against the reference that it has, and sees from the sums of
its lanes whether that was good enough; if not, it computes the scores again and takes the maximum
after all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

WARP_ROWS = 16
WARPGROUP_ROWS = 64
SUM_LIMIT = 2.0**15  # of one lane and row: OnlineSoftmax::kSumLimit
WALKS = ("backward", "forward")
RESCALE_THRESHOLD = 8.0  # in base 2: OnlineSoftmax::kRescaleThreshold


@dataclass
class Count:
    """Key blocks exponentiated at once and those of them redone; by warp, and by warpgroup, whose
    other warps wait for the one that does it again."""

    warp_blocks: int = 0
    warp_redone: int = 0
    warpgroup_blocks: int = 0
    warpgroup_redone: int = 0

    def add(self, other: Count) -> None:
        self.warp_blocks += other.warp_blocks
        self.warp_redone += other.warp_redone
        self.warpgroup_blocks += other.warpgroup_blocks
        self.warpgroup_redone += other.warpgroup_redone


def exponents(query: Tensor, key: Tensor, scale: float, causal: bool) -> Tensor:
    """(Sq, Sk) scores of one head as exponents of 2, hidden ones at -inf."""
    scores = (query.float() @ key.float().T).mul_(scale * math.log2(math.e))
    if causal:
        hidden = torch.ones(scores.shape, dtype=torch.bool, device=scores.device).triu_(1)
        scores.masked_fill_(hidden, -math.inf)
    return scores


def lane_sums(tile: Tensor) -> Tensor:
    """(..., 4): the sums over the columns that each lane of a quad holds, 8 n + 2 lane + {0, 1}."""
    # In two steps: several times as fast as one sum over both dimensions.
    return tile.unflatten(-1, (-1, 8)).sum(-2).unflatten(-1, (4, 2)).sum(-1)


def count_redos(scores: Tensor, block_n: int, causal: bool, walk: str) -> Count:
    """Counts over one head. `scores` as from `exponents`, with as many rows as keys."""
    seqlen = scores.shape[0]
    if scores.shape != (seqlen, seqlen) or seqlen % WARPGROUP_ROWS or block_n % 8:
        raise RuntimeError(
            f"scores: must be square in multiples of {WARPGROUP_ROWS} and block_n a multiple of 8, "
            f"got {tuple(scores.shape)} and {block_n}"
        )
    device = scores.device
    rows = scores.view(-1, WARP_ROWS, seqlen)  # [warps, 16, keys]
    warps = torch.arange(rows.shape[0], device=device)
    first_row = warps * WARP_ROWS // WARPGROUP_ROWS * WARPGROUP_ROWS  # of the warpgroup
    keys_end = first_row + WARPGROUP_ROWS if causal else torch.full_like(warps, seqlen)
    full_end = first_row + 1 if causal else keys_end  # visible to every row of the warpgroup
    last = (keys_end - 1) // block_n
    last_full = full_end // block_n - 1
    if walk == "backward":
        last_full = torch.minimum(last_full, last - 1)

    reference = torch.full(rows.shape[:2], -math.inf, device=device)
    count = Count()
    blocks = range(int(last.max()) + 1)
    for block in blocks if walk == "forward" else reversed(blocks):
        # Later warps see more keys: those that visit the block, and those that exponentiate it at
        # once, are the last ones.
        visiting = int((last < block).sum())
        at_once = int((last_full < block).sum())
        if walk == "forward" and block == 0:
            at_once = len(warps)
        tile = rows[:, :, block * block_n : (block + 1) * block_n]
        with_max = warps[visiting:at_once]
        if at_once < len(warps):
            sums = lane_sums((tile[at_once:] - reference[at_once:, :, None]).exp2_())
            redone = ~(sums < SUM_LIMIT).all(-1).all(-1)
            groups = redone.view(-1, WARPGROUP_ROWS // WARP_ROWS).any(-1)
            count.add(Count(redone.numel(), int(redone.sum()), groups.numel(), int(groups.sum())))
            with_max = torch.cat([with_max, warps[at_once:][redone]])
        if len(with_max):
            tile_max = tile[with_max].amax(-1)
            outgrown = (tile_max - reference[with_max] > RESCALE_THRESHOLD).any(-1)
            new = torch.maximum(reference[with_max], tile_max)[outgrown]
            reference[with_max[outgrown]] = new
    return count
