"""fa::forward on CUDA streams, in CUDA graphs, on several devices, and the memory that it takes."""

import pytest
import torch
from cases import qkv, randn
from reference import check

from flashattn_ext import flash_attn_func, scaled_dot_product_attention

forward = torch.ops.fa.forward.default


@pytest.fixture
def cuda(device):
    if device == "cpu":
        pytest.skip("CUDA only")
    return device


def cuda_arguments(device):
    """A call of each kind of kernel: options, and the mask if any."""
    mask = torch.rand(2, 1, 300, 260, device=device) < 0.7
    for options, attn_mask in (
        ({}, None),
        ({"is_causal": True, "bottom_right": True}, None),
        ({"window_left": 40, "window_right": 3}, None),
        ({}, mask),
    ):
        yield qkv((4, 2), (300, 260), 64, device=device, batch=2), attn_mask, options


def test_graph_replay_with_new_data(cuda):
    for tensors, attn_mask, options in cuda_arguments(cuda):
        forward(*tensors, attn_mask, **options)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, lse = forward(*tensors, attn_mask, **options)
        for _ in range(3):
            for tensor in tensors:
                tensor.copy_(torch.randn_like(tensor))
            if attn_mask is not None:
                attn_mask.copy_(torch.rand(attn_mask.shape, device=cuda) < 0.5)
            out.fill_(torch.nan)
            lse.fill_(torch.nan)
            graph.replay()
            expected, expected_lse = forward(*tensors, attn_mask, **options)
            assert torch.equal(out, expected) and torch.equal(lse, expected_lse)


def test_public_functions_in_a_graph(cuda):
    query, key, value = qkv((4, 4), (65, 65), 64, device=cuda, batch=2)

    def attend():
        flash = flash_attn_func(*(t.transpose(1, 2) for t in (query, key, value)), causal=True)
        return scaled_dot_product_attention(query, key, value, is_causal=True), flash

    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, flash = attend()
    query.copy_(torch.randn_like(query))
    graph.replay()
    expected, expected_flash = attend()
    assert torch.equal(out, expected) and torch.equal(flash, expected_flash)


def test_no_host_synchronisation(cuda):
    calls = list(cuda_arguments(cuda))
    query, key, value = calls[0][0]
    expected = [forward(*tensors, mask, **options)[0] for tensors, mask, options in calls]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        outs = [forward(*tensors, mask, **options)[0] for tensors, mask, options in calls]
        scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        flash_attn_func(*(t.transpose(1, 2) for t in (query, key, value)), causal=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for out, reference in zip(outs, expected, strict=True):
        assert torch.equal(out, reference)


def test_side_stream(cuda):
    """The work is ordered after what was enqueued before it on the current stream, and only so."""
    query, key, value = qkv((4, 2), (300, 260), 64, device=cuda, batch=2)
    late = torch.randn_like(query)
    expected, _ = forward(late, key, value)
    query.zero_()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # about 30 ms: on another stream the kernel would run ahead
        query.copy_(late)
        out, _ = forward(query, key, value)
        done = stream.record_event()
    assert not done.query()
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(out, expected)


def test_device_other_than_current(cuda):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    assert torch.cuda.current_device() == 0
    for tensors, attn_mask, options in cuda_arguments("cuda:1"):
        out, lse = check(*tensors, attn_mask, **options)
        assert out.device == lse.device == torch.device("cuda:1")
    assert torch.cuda.current_device() == 0
    ones = torch.ones(4, 32, 16, 64, device="cuda:1", dtype=torch.float16)
    assert scaled_dot_product_attention(ones, ones, ones).float().sum().item() == 131072
    mixed = [ones, ones.to("cuda:0"), ones]
    with pytest.raises(RuntimeError, match=r"key: device must equal .* \(cuda:1\), got cuda:0"):
        forward(*mixed)


def test_memory_is_outputs_only(cuda):
    """Nothing beside out and lse, transposed inputs and grouped heads included."""
    shapes = (2, 4096, 16, 64), (2, 4096, 2, 64), (2, 4096, 2, 64)
    query, key, value = (randn(*shape, device=cuda).transpose(1, 2) for shape in shapes)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out, lse = forward(query, key, value, None, True)
    needed = out.nbytes + lse.nbytes
    assert torch.cuda.max_memory_allocated() - before <= needed + 2**20
