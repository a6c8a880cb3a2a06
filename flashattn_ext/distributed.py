"""DTensor: how `torch.ops.fa.forward` and its gradients run on sharded tensors.

    import flashattn_ext.distributed
    flashattn_ext.distributed.register()

Owns the sharding rules and nothing else. The batches and the groups of heads that share keys know
nothing of each other, so each rank computes its own ones without communication.
"""

from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from . import ops

_BATCH, _HEADS = 0, 1  # dimensions of all tensors but a mask, which may have fewer


def register() -> None:
    """Make DTensor know `torch.ops.fa.forward` and `torch.ops.fa.backward`.

    Afterwards they, and the public functions above them, take DTensors and return DTensors. Along
    each dimension of the mesh query, key and value, with them out and LSE, and the gradients, may
    be

    - sharded by batch;
    - sharded by heads, if the key heads split evenly, so that every rank has whole groups of query
      heads. On a mesh of several dimensions each product of their sizes has to divide the key heads
      if it is not above their number, since any of the dimensions may end up with the heads;
    - replicated.

    A mask is sharded with them where it has that dimension, and replicated where it broadcasts.
    Calls on tensors placed like that communicate nothing, in the backward neither. Others, sharded
    by sequence for example, or by too few key heads, DTensor first brings into one of these forms,
    with the collectives that it takes.

    Calling it again changes nothing. Importing flashattn_ext does not call it, as the rules need
    parts of torch.distributed that few programs load.
    """
    register_sharding(ops.forward)(_forward_rules)
    register_sharding(ops.backward)(_backward_rules)
    ops.tensor_types.add(DTensor)


def _forward_rules(query, key, value, attn_mask=None, *options, **keywords):
    """(placements of out and lse, placements of the arguments), for each way to shard."""
    fits = value.shape == key.shape
    return [
        ([tensor] * 2, [*[tensor] * 3, mask, *[None] * len(options)])
        for tensor, mask in _placements(query, key, attn_mask, fits)
    ]


def _backward_rules(grad_out, query, key, value, out, lse, attn_mask=None, *options, **keywords):
    """(placements of the gradients, placements of the arguments), for each way to shard."""
    fits = (
        value.shape == key.shape
        and grad_out.shape == out.shape == query.shape
        and lse.shape == query.shape[:3]
    )
    return [
        ([tensor] * 3, [*[tensor] * 6, mask, *[None] * len(options)])
        for tensor, mask in _placements(query, key, attn_mask, fits)
    ]


def _placements(query, key, attn_mask, fits):
    """The placement that the tensors share and that of the mask, for each way to shard.

    Shards of wrong arguments may happen to fit on some ranks. Where the shapes are wrong as a whole
    nothing is sharded, so that the operator refuses them on every rank, naming their real sizes.
    """
    ways = [(Replicate(), None if attn_mask is None else Replicate())]
    fits = fits and len(query.shape) == len(key.shape) == 4 and query.shape[0] == key.shape[0]
    heads_q, heads_k = (query.shape[1], key.shape[1]) if fits else (1, 0)
    if heads_k == 0 or heads_q % heads_k != 0:
        return ways
    dims = [_BATCH, _HEADS] if _split_evenly(heads_k, query.mesh) else [_BATCH]
    for dim in dims:
        if attn_mask is None:
            ways.append((Shard(dim), None))
            continue
        mask_dim = len(attn_mask.shape) - 4 + dim  # masks are aligned at their last dimension
        mask_size = attn_mask.shape[mask_dim] if mask_dim >= 0 else 1
        if mask_size == query.shape[dim]:
            ways.append((Shard(dim), Shard(mask_dim) if mask_dim >= 0 else Replicate()))
        elif mask_size == 1:
            ways.append((Shard(dim), Replicate()))
    return ways


def _split_evenly(heads_k, mesh):
    """Whether any set of mesh dimensions may shard the heads.

    A rule speaks of one dimension of the mesh, and DTensor combines the rules of all of them. It
    leaves out combinations with more shards than heads.
    """
    shards = {1}
    for size in mesh.shape:
        shards |= {count * size for count in shards}
    return all(heads_k % count == 0 for count in shards if count <= heads_k)
