"""What is timed by bench_backward.py: inputs with a gradient of the output, the work of a backward,
and the check of its results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from workload import TOLERANCE, Inputs, Problem, input_sets, least_bytes, useful_flops

MOST_SCORES = 2**27  # of the reference, in float64, of which autograd keeps several copies


class Gradients(NamedTuple):
    query: Tensor  # (B, Hq, Sq, D)
    key: Tensor  # (B, Hk, Sk, D)
    value: Tensor  # (B, Hk, Sk, D)


@dataclass
class GradientInputs(Inputs):
    grad_out: Tensor  # (B, Hq, Sq, D), laid out as the query

    def leaves(self) -> GradientInputs:
        """The same memory, as tensors that require grad."""
        query, key, value = (
            tensor.detach().requires_grad_() for tensor in (self.query, self.key, self.value)
        )
        return GradientInputs(query, key, value, None, self.grad_out)

    def gradients(self, out: Tensor, retain_graph: bool = False) -> Gradients:
        """The backward of `out`, which was computed from these leaves."""
        leaves = (self.query, self.key, self.value)
        return Gradients(*torch.autograd.grad(out, leaves, self.grad_out, retain_graph))


def gradient_inputs(problem: Problem, device: torch.device) -> list[GradientInputs]:
    """The sets of workload.input_sets, each with a random normal gradient of the output."""
    return [
        GradientInputs(x.query, x.key, x.value, None, torch.randn_like(x.query))
        for x in input_sets(problem, device)
    ]


def gradient_flops(problem: Problem) -> int:
    """Five matrix products over the visible pairs where the forward has two."""
    return useful_flops(problem) * 5 // 2


def gradient_bytes(problem: Problem) -> int:
    """Query, key, value, out, its gradient and the LSE read once, three gradients written once."""
    p = problem
    return 2 * least_bytes(p) + 4 * p.batch * p.heads_q * p.seqlen_q


@dataclass
class GradientReference:
    """The exact gradients of some key heads and of the query heads that read them, by torch's MATH
    backend in fp64. The heads are spread evenly over the batch, the first and the last included: as
    many as fit a gigabyte of scores, but at least two."""

    heads_k: int
    batches: Tensor  # [chosen]
    heads: Tensor  # [chosen], of key and value
    exact: Gradients  # [chosen, group, Sq, D] and twice [chosen, 1, Sk, D], fp64
    size: Gradients  # natural_size: the same shapes, with 1 for D

    @classmethod
    def of(
        cls, problem: Problem, inputs: GradientInputs, scale: float | None = None
    ) -> GradientReference:
        p = problem
        group, every = p.heads_q // p.heads_k, p.batch * p.heads_k
        fitting = max(2, MOST_SCORES // (group * p.seqlen_q * p.seqlen_k))
        chosen = torch.linspace(0, every - 1, min(fitting, every), dtype=torch.float64)
        chosen = chosen.round().long().to(inputs.query.device)
        batches, heads = chosen // p.heads_k, chosen % p.heads_k

        def pick(tensor: Tensor) -> Tensor:
            return pick_heads(tensor, p.heads_k, batches, heads).double()

        x = GradientInputs(
            pick(inputs.query), pick(inputs.key), pick(inputs.value), None, pick(inputs.grad_out)
        )
        leaves = x.leaves()
        with sdpa_kernel(SDPBackend.MATH):
            out = F.scaled_dot_product_attention(
                leaves.query,
                leaves.key,
                leaves.value,
                is_causal=p.mask == "causal",
                scale=scale,
                enable_gqa=group > 1,
            )
        exact = leaves.gradients(out)
        return cls(p.heads_k, batches, heads, exact, natural_size(p, x, scale))

    def error_share(self, gradients: Gradients) -> float:
        """The largest error of any element of the three, as a share of what is allowed, which is
        TOLERANCE * (|exact| + size); NaN if any."""
        shares = []
        for gradient, exact, size in zip(gradients, self.exact, self.size, strict=True):
            error = pick_heads(gradient, self.heads_k, self.batches, self.heads) - exact
            allowed = TOLERANCE[gradient.dtype] * (exact.abs() + size)
            shares.append((error.abs() / allowed).max())
        return torch.stack(shares).max().item()


def natural_size(problem: Problem, x: GradientInputs, scale: float | None) -> Gradients:
    """The rms of a row of each gradient if the terms of every sum had random signs: the root of
    the sum of their squares. In dS = P (dP - delta) both are sums, each of them rounded before they
    cancel: entirely so in the first row of a causal problem."""
    scale = problem.head_dim**-0.5 if scale is None else scale
    scores = scale * (x.query @ x.key.mT)
    if problem.mask == "causal":
        hidden = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1)
        scores.masked_fill_(hidden, -torch.inf)
    weights = scores.softmax(-1)
    grad_out = x.grad_out.square()
    delta = (grad_out * (weights @ x.value).square()).sum(-1, keepdim=True)
    weights.square_()
    grad_scores = scale**2 * weights * (grad_out @ x.value.square().mT + delta)

    def rows(squares: Tensor, vectors: Tensor) -> Tensor:
        return squares @ vectors.square().mean(-1, keepdim=True)

    return Gradients(
        rows(grad_scores, x.key).sqrt(),
        rows(grad_scores.mT, x.query).sum(1, keepdim=True).sqrt(),
        rows(weights.mT, x.grad_out).sum(1, keepdim=True).sqrt(),
    )


def pick_heads(tensor: Tensor, heads_k: int, batches: Tensor, heads: Tensor) -> Tensor:
    """[chosen, heads of a group, S, D] of (B, H, S, D): the heads that belong to the key heads."""
    return tensor.unflatten(1, (heads_k, -1))[batches, heads]
