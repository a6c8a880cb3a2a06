"""DTensor: the operators on sharded tensors, on gloo ranks of the CPU, against the same call on
whole tensors. Run as a script, this file goes through all cases on forked ranks: importing torch
and starting a process group for each case would take longer than the cases.
"""

import functools
import warnings

import gloo_ranks
import pytest
import torch
import torch.distributed as dist

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("torch without gloo", allow_module_level=True)

from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import flashattn_ext
from flashattn_ext import distributed

BATCH, SEQLEN_Q, SEQLEN_K, HEAD_DIM = 4, 5, 7, 8


def inputs(heads_q, heads_k, mask_shape=None):
    """query, key, value, grad_out and the mask: whole, the same on every rank."""
    shapes = [(heads, seqlen) for heads, seqlen in ((heads_q, SEQLEN_Q), (heads_k, SEQLEN_K))]
    query, key = (torch.randn(BATCH, *shape, HEAD_DIM, dtype=torch.float64) for shape in shapes)
    mask = None if mask_shape is None else torch.rand(mask_shape) < 0.7
    return query, key, torch.randn_like(key), torch.randn_like(query), mask


def run(query, key, value, grad_out, mask, options, forward=torch.ops.fa.forward):
    """out, lse and the three gradients; what comes in is left as it is."""
    leaves = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
    out, lse = forward(*leaves, mask, **options)
    return out, lse, *torch.autograd.grad(out, leaves, grad_out)


def check(mesh, placements, tensors, mask_placements=None, *, free, **options):
    """Results on shards equal those on whole tensors; `free`: without communication, and every
    result is placed as the inputs are. Returns where the results are."""
    expected = run(*tensors, options)
    shards = [distribute_tensor(tensor, mesh, placements) for tensor in tensors[:4]]
    mask = tensors[4]
    if mask is not None:
        mask = distribute_tensor(mask, mesh, mask_placements or [Replicate()] * mesh.ndim)
    with CommDebugMode() as communication:
        results = run(*shards, mask, options)
    assert (communication.get_total_counts() == 0) == free, communication.get_comm_counts()
    for result, whole in zip(results, expected, strict=True):
        assert not free or result.placements == tuple(placements), result.placements
        torch.testing.assert_close(result.full_tensor(), whole, rtol=1e-10, atol=1e-10)
    return [result.placements for result in results]


def without_mask(mesh, ranks):
    for placement in (Shard(0), Shard(1), Replicate()):
        tensors = inputs(2 * ranks, ranks)
        check(mesh, [placement], tensors, is_causal=True, window_left=2, free=True)
        check(mesh, [placement], tensors, scale=0.3, bottom_right=True, is_causal=True, free=True)


def uneven_batch(mesh, ranks):
    tensors = [tensor[:-1] for tensor in inputs(2, 1)[:4]]
    check(mesh, [Shard(0)], [*tensors, None], free=len(tensors[0]) >= ranks)


def masks(mesh, ranks):
    heads = 2 * ranks
    rows = (SEQLEN_Q, SEQLEN_K)
    for shape, batch_dim, heads_dim in (
        (rows, None, None),
        ((1, *rows), None, None),
        ((heads, *rows), None, 0),
        ((1, 1, *rows), None, None),
        ((BATCH, 1, 1, SEQLEN_K), 0, None),
        ((1, heads, *rows), None, 1),
        ((BATCH, heads, *rows), 0, 1),
    ):
        tensors = inputs(heads, ranks, shape)
        for dim, mask_dim in ((0, batch_dim), (1, heads_dim)):
            check(mesh, [Shard(dim)], tensors, free=True)
            if mask_dim is not None:
                check(mesh, [Shard(dim)], tensors, [Shard(mask_dim)], free=True)
    # A mask that is sharded where it cannot stay so.
    tensors = inputs(heads, ranks, (BATCH, heads, *rows))
    check(mesh, [Shard(0)], tensors, [Shard(1)], free=False)
    tensors = inputs(heads, ranks, rows)
    check(mesh, [Replicate()], tensors, [Shard(0)], free=False)


def heads_that_do_not_split(mesh, ranks):
    for heads_k in (ranks - 1, ranks + 1):
        # Query heads split evenly, key heads do not.
        placements = check(mesh, [Shard(1)], inputs(heads_k * ranks, heads_k), free=False)
        assert (Shard(1),) not in placements, placements
    placements = check(mesh, [Replicate()], inputs(ranks, 1), free=True)
    assert set(placements) == {(Replicate(),)}


def other_placements(mesh, ranks):
    for dim in (2, 3):
        # DTensor remembers how it places a call; the options of the first must not stay with it.
        for is_causal in (False, True):
            for scale in (None, -0.5):
                tensors = inputs(ranks, ranks)
                check(mesh, [Shard(dim)], tensors, is_causal=is_causal, scale=scale, free=False)


def public_functions(mesh, ranks):
    tensors = inputs(2 * ranks, ranks)
    for dim in (0, 1):
        shards = [distribute_tensor(tensor, mesh, [Shard(dim)]) for tensor in tensors[:4]]
        with CommDebugMode() as communication, warnings.catch_warnings():
            warnings.simplefilter("error")  # as when a call goes to torch
            results = [attend(*x[:3], x[3]) for x in (shards, tensors) for attend in PUBLIC]
        assert communication.get_total_counts() == 0
        for result, whole in zip(results[: len(PUBLIC)], results[len(PUBLIC) :], strict=True):
            for x, y in zip(result, whole, strict=True):
                torch.testing.assert_close(x.full_tensor(), y, rtol=1e-10, atol=1e-10)


def gradients_of(function):
    """The result and the gradients of a function of query, key and value."""

    def attend(query, key, value, grad_out):
        leaves = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
        out = function(*leaves)
        return out, *torch.autograd.grad(out, leaves, grad_out)

    return attend


def flash_layout(query, key, value):
    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
    return flashattn_ext.flash_attn_func(q, k, v, causal=True).transpose(1, 2)


PUBLIC = [
    gradients_of(flash_layout),
    gradients_of(
        functools.partial(
            flashattn_ext.scaled_dot_product_attention, is_causal=True, enable_gqa=True
        )
    ),
]


def gradient_placed_otherwise(mesh, ranks):
    tensors = inputs(2 * ranks, ranks)
    shards = [distribute_tensor(tensor, mesh, [Shard(1)]) for tensor in tensors[:3]]
    expected = run(*tensors, {})
    for placement in (Replicate(), Shard(0), Shard(2)):
        results = run(*shards, distribute_tensor(tensors[3], mesh, [placement]), None, {})
        for result, whole in zip(results, expected, strict=True):
            torch.testing.assert_close(result.full_tensor(), whole, rtol=1e-10, atol=1e-10)


def wrong_arguments(mesh, ranks):
    """Their shards fit on some ranks; all ranks refuse the whole, with its sizes."""

    def refused(operator, dim, wrong, *tensors):
        shards = [distribute_tensor(tensor, mesh, [Shard(dim)]) for tensor in tensors]
        with pytest.raises(RuntimeError, match=rf"got .*\b{wrong}\b"):
            operator(*shards)

    forward, backward = torch.ops.fa.forward, torch.ops.fa.backward
    query, key, value, grad_out, _ = inputs(2 * ranks, ranks)
    refused(forward, 1, 2 * ranks - 1, query[:, 1:], key, value)
    refused(forward, 0, BATCH - 1, query, key[1:], value[1:])
    out, lse = forward(query, key, value)
    refused(backward, 0, BATCH - 1, grad_out[1:], query, key, value, out, lse)
    refused(backward, 0, BATCH - 1, grad_out, query, key, value, out, lse[1:])


def compiled(mesh, ranks):
    if ranks > 2:
        return  # tracing takes longer than all of the above

    def attend(*arguments, **keywords):
        return torch.ops.fa.forward(*arguments, **keywords)

    tensors = inputs(2 * ranks, ranks)
    expected = run(*tensors, {"is_causal": True})
    shards = [distribute_tensor(tensor, mesh, [Shard(1)]) for tensor in tensors[:4]]
    traced = torch.compile(attend, backend="aot_eager", fullgraph=True)
    for result, whole in zip(
        run(*shards, None, {"is_causal": True}, traced), expected, strict=True
    ):
        assert result.placements == (Shard(1),)
        torch.testing.assert_close(result.full_tensor(), whole, rtol=1e-10, atol=1e-10)


def two_dimensions(mesh, ranks):
    """Batches along one dimension of the mesh and heads along the other; heads along both."""
    if ranks < 4:
        return
    mesh = dist.init_device_mesh("cpu", (2, ranks // 2))
    for heads_k, placements, free in (
        (2, [Shard(0), Shard(1)], True),
        (2, [Shard(1), Shard(0)], True),
        (2, [Replicate(), Shard(1)], True),
        (2, [Shard(0), Shard(0)], True),
        (4, [Shard(1), Shard(1)], True),
        (2, [Shard(1), Shard(1)], False),
        # Each dimension divides them, both together do not: 12 query heads would be 3 to a rank,
        # and the key heads 2, 1, 2 and 1.
        (6, [Shard(1), Shard(1)], False),
    ):
        check(mesh, placements, inputs(2 * heads_k, heads_k), free=free)


CASES = (
    without_mask,
    uneven_batch,
    masks,
    heads_that_do_not_split,
    other_placements,
    public_functions,
    gradient_placed_otherwise,
    wrong_arguments,
    two_dimensions,
    compiled,
)


def prepare():
    distributed.register()
    distributed.register()  # changes nothing


@pytest.mark.parametrize("ranks", [2, 4])
def test_shards_equal_the_whole(ranks, seed, tmp_path):
    gloo_ranks.check_cases(__file__, CASES, ranks, seed, tmp_path)


if __name__ == "__main__":
    gloo_ranks.main(CASES, prepare)
