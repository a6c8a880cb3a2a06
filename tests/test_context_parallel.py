"""Attention over several processes, on gloo ranks of the CPU, against the same on whole tensors.

DTensor and torch's context parallelism on torch's own operators with our kernels behind them, and a
ring made by hand of fa::forward, fa::backward and fa::merge_states.

Run as a script, this file goes through all cases on forked ranks, as test_distributed.py does.
"""

import warnings

import gloo_ranks
import pytest
import torch
import torch.distributed as dist

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("torch without gloo", allow_module_level=True)

from overriding import MASKED, call, overridden
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import (
    context_parallel_unshard,
    set_rotate_method,
)

import flashattn_ext  # noqa: F401  (defines the operators)

SEQLEN = 64  # of a rank; the memory-efficient operator wants halves of 32 rows
FLASH = "_scaled_dot_product_flash_attention"


def inputs(ranks, heads_k=4):
    """query, key, value and grad_out: whole, the same on every rank."""
    seqlen = SEQLEN * ranks
    shapes = [(2, heads, seqlen, 16) for heads in (4, heads_k, heads_k, 4)]
    return [torch.randn(shape) for shape in shapes]


def on_whole_tensors(query, key, value, grad_out, is_causal):
    leaves = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
    out, _ = torch.ops.fa.forward(*leaves, None, is_causal)
    return out.detach(), *torch.autograd.grad(out, leaves, grad_out)


def compare(results, expected):
    for result, whole in zip(results, expected, strict=True):
        torch.testing.assert_close(result, whole, rtol=1e-5, atol=1e-5)


def sharded(mesh, ranks):
    """DTensors by batch and by heads: no communication."""
    for name in (FLASH, *MASKED):
        for dim in (0, 1):
            tensors = [x.repeat(ranks, 1, 1, 1) for x in inputs(1)]
            expected = on_whole_tensors(*tensors, True)
            shards = [distribute_tensor(tensor, mesh, [Shard(dim)]) for tensor in tensors]
            leaves = [tensor.requires_grad_() for tensor in shards[:3]]
            with overridden(name, "cpu") as stock, CommDebugMode() as communication:
                out = call(name, *leaves, is_causal=True)[0]
                results = (out.detach(), *torch.autograd.grad(out, leaves, shards[3]))
            assert not stock.calls
            assert communication.get_total_counts() == 0
            compare([result.full_tensor() for result in results], expected)


def replicated(mesh, ranks):
    tensors = inputs(1)
    expected = on_whole_tensors(*tensors, False)
    copies = [distribute_tensor(tensor, mesh, [Replicate()]) for tensor in tensors]
    leaves = [tensor.requires_grad_() for tensor in copies[:3]]
    with overridden(FLASH, "cpu"):
        out = call(FLASH, *leaves)[0]
        results = (out.detach(), *torch.autograd.grad(out, leaves, copies[3]))
    compare([result.full_tensor() for result in results], expected)


def context(mesh, ranks):
    """torch's context_parallel: sequences sharded, causal work balanced, keys in a ring."""
    for rotate in ("allgather", "alltoall"):
        set_rotate_method(rotate)
        for name in (FLASH, *MASKED):
            whole = inputs(ranks)
            buffers = [tensor.clone() for tensor in whole]
            expected = on_whole_tensors(*whole, True)
            with (
                overridden(name, "cpu") as stock,
                context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4),
            ):
                leaves = [tensor.detach().clone().requires_grad_() for tensor in buffers[:3]]
                tensors = [DTensor.from_local(leaf, mesh, [Shard(2)]) for leaf in leaves]
                out = call(name, *tensors, is_causal=True)[0].to_local()
                gradients = torch.autograd.grad(out, leaves, buffers[3])
                results = context_parallel_unshard(mesh, [out.detach(), *gradients], [2] * 4)
            assert not stock.calls
            compare(results, expected)


def passed_on(tensors):
    """What the rank before this one has."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    received = [torch.empty_like(tensor) for tensor in tensors]
    work = []
    for source, target in zip(tensors, received, strict=True):
        work.append(dist.isend(source.contiguous(), (rank + 1) % ranks))
        work.append(dist.irecv(target, (rank - 1) % ranks))
    for each in work:
        each.wait()
    return received


def ring(mesh, ranks):
    """By hand: a rank keeps its queries, and keys and values go round, later with their gradients.
    The backward of a part takes out and lse of the whole."""
    rank = dist.get_rank()
    for is_causal in (False, True):
        for heads_k in (4, 2):
            whole = inputs(ranks, heads_k)
            expected = on_whole_tensors(*whole, is_causal)
            mine = [tensor.chunk(ranks, dim=2)[rank].contiguous() for tensor in whole]
            query, *key_value, grad_out = mine

            def visible(step, is_causal=is_causal):
                return not is_causal or step <= rank  # the keys come from rank - step

            out = torch.zeros_like(query)
            lse = torch.full(query.shape[:3], -torch.inf)
            for step in range(ranks):
                if visible(step):
                    part = torch.ops.fa.forward(query, *key_value, None, is_causal and step == 0)
                    out, lse = torch.ops.fa.merge_states(out, lse, *part)
                key_value = passed_on(key_value)

            grad_query = torch.zeros_like(query)
            gradients = [torch.zeros_like(tensor) for tensor in key_value]
            for step in range(ranks):
                if visible(step):
                    grads = torch.ops.fa.backward(
                        grad_out, query, *key_value, out, lse, None, is_causal and step == 0
                    )
                    grad_query += grads[0]
                    gradients = [x + y for x, y in zip(gradients, grads[1:], strict=True)]
                *key_value, gradients[0], gradients[1] = passed_on([*key_value, *gradients])
            results = (out, grad_query, *gradients)
            compare(results, [tensor.chunk(ranks, dim=2)[rank] for tensor in expected])


CASES = (sharded, replicated, context, ring)


def prepare():
    warnings.simplefilter("ignore")  # torch's, on names it is about to change


@pytest.mark.parametrize("ranks", [2, 4])
def test_parts_equal_the_whole(ranks, seed, tmp_path):
    gloo_ranks.check_cases(__file__, CASES, ranks, seed, tmp_path)


if __name__ == "__main__":
    gloo_ranks.main(CASES, prepare)
