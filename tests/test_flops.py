"""torch's flop counter on our operators: it counts as many as for its own attention."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import flashattn_ext


def flops(function):
    """What torch counts, by operator."""
    with FlopCounterMode(display=False) as counter:
        function()
    return {str(operator): count for operator, count in counter.get_flop_counts()["Global"].items()}


def tensors(heads_q, heads_k, device="cpu"):
    shapes = [(2, heads_q, 5, 8), (2, heads_k, 7, 8), (2, heads_k, 7, 8)]
    return [torch.randn(shape, device=device, requires_grad=True) for shape in shapes]


def torch_flops(query, key, value, **options):
    """Of torch's plain attention, which is made of matrix products; fused ones are not counted for
    the CPU, nor with fewer key heads in torch 2.11."""
    with sdpa_kernel(SDPBackend.MATH):
        return sum(
            flops(lambda: F.scaled_dot_product_attention(query, key, value, **options)).values()
        )


@pytest.mark.parametrize(("heads_q", "heads_k"), [(3, 3), (6, 2), (4, 1)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_forward(heads_q, heads_k, is_causal):
    query, key, value = tensors(heads_q, heads_k)
    ours = flops(lambda: torch.ops.fa.forward(query, key, value, None, is_causal))
    expected = torch_flops(query, key, value, is_causal=is_causal, enable_gqa=True)
    assert ours == {"fa.forward": expected}
    assert ours == flops(lambda: torch.ops.fa.forward(query, key, value, window_left=1))


def test_public_functions_count_too():
    query, key, value = tensors(6, 2)
    expected = {"fa.forward": torch_flops(query, key, value, enable_gqa=True)}
    attention = flashattn_ext.scaled_dot_product_attention
    mask = torch.ones(5, 7, dtype=torch.bool)
    assert expected == flops(lambda: attention(query, key, value, mask, enable_gqa=True))
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    assert expected == flops(lambda: flashattn_ext.flash_attn_func(query, key, value, causal=True))


def test_backward():
    """As torch's fused backward, which computes the scores again."""
    query, key, value = tensors(3, 3, "meta")
    out, lse = torch.ops.fa.forward(query, key, value)
    unused = (None, None, 5, 7, 0.0, False, torch.empty(2), torch.empty(2))
    expected = flops(
        lambda: torch.ops.aten._scaled_dot_product_flash_attention_backward(
            torch.empty_like(out), query, key, value, out, lse, *unused
        )
    )
    ours = flops(lambda: out.sum().backward())
    assert list(ours) == ["fa.backward"]
    assert list(ours.values()) == list(expected.values()) and sum(ours.values()) > 0


def test_backward_counts_query_heads():
    few, many = (torch.ops.fa.forward(*tensors(6, heads_k))[0].sum() for heads_k in (2, 6))
    assert flops(few.backward) == flops(many.backward) != {}


@pytest.mark.parametrize("paged", [False, True])
def test_kvcache(paged):
    """All slots count, whatever the lengths say."""
    query = torch.randn(2, 3, 6, 8)
    key, value = torch.randn(2, 2, 64, 2, 8)
    expected = torch_flops(*(t.transpose(1, 2) for t in (query, key, value)), enable_gqa=True)
    table = None
    if paged:
        key, value = (t.reshape(8, 16, 2, 8) for t in (key, value))
        table = torch.arange(8, dtype=torch.int32).reshape(2, 4)
    lengths = torch.tensor([5, 9], dtype=torch.int32)
    ours = flops(
        lambda: flashattn_ext.flash_attn_with_kvcache(
            query, key, value, cache_seqlens=lengths, block_table=table
        )
    )
    assert ours == {"fa.forward_kvcache": expected}
