"""The derivative of fa::forward under modes, transforms, torch.compile, CUDA streams and graphs."""

import pytest
import torch
import torch.nn.functional as F
from backward_calls import Calls, backward, forward, inputs, plain, saved_of
from calls import qkv, randn, silent, torch_sdpa
from reference import check_gradients, close
from torch._dynamo import compiled_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from flashattn_ext import flash_attn_func, interface, scaled_dot_product_attention


@pytest.fixture
def fresh_dynamo(monkeypatch):
    """No compiled code, and no warning given, before or after."""
    monkeypatch.setattr(interface, "_warned", set())
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


needs_compile = pytest.mark.usefixtures("fresh_dynamo")


# --- modes and transforms -------------------------------------------------------------------------


@pytest.mark.parametrize("deterministic", [False, True])
def test_deterministic_argument(device, deterministic):
    """Of the op and of flash_attn_func, passed on to backward."""
    q, k, v = inputs(device, q=(2, 9, 4, 16), k=(2, 13, 2, 16))
    out = flash_attn_func(q, k, v, deterministic=deterministic)
    other = forward(*(t.transpose(1, 2) for t in (q, k, v)), deterministic=deterministic)[0]
    with Calls() as calls:
        (out.sum() + other.transpose(1, 2).sum()).backward()
    assert len(calls.calls) == 2
    assert all(c.get("deterministic", False) == deterministic for c in calls.calls)


def test_deterministic_algorithms(device):
    """torch's switch is read when backward runs."""
    tensors = inputs(device)
    for deterministic in (False, True, False):
        out = forward(*tensors)[0]
        before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(deterministic)
        try:
            with Calls() as calls:
                out.sum().backward()
        finally:
            torch.use_deterministic_algorithms(before)
        (options,) = calls.calls
        assert options.get("deterministic", False) == deterministic


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast(device, dtype):
    """The op casts as torch's attention does, and gradients come in the dtype of the leaves; a mask
    in float32 keeps its digits."""
    tensors = inputs(device, torch.float32, k=(2, 4, 13, 16))
    mask = 1000 + randn(9, 13, device=device, dtype=torch.float32)
    low = [t.detach().to(dtype) for t in tensors]
    with torch.autocast(device, dtype):
        out, lse = forward(*tensors, mask)
        expected = forward(*low, mask)
        assert forward(*low, mask.to(torch.bfloat16))[0].dtype == dtype
        assert torch_sdpa(*tensors).dtype == out.dtype == dtype
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    out.backward(torch.ones_like(out))
    gradients = backward(torch.ones_like(out), *low, *expected, mask)
    for tensor, gradient in zip(tensors, gradients, strict=True):
        assert tensor.grad.dtype == torch.float32
        close(tensor.grad.to(dtype), gradient, dtype)


def test_autocast_leaves_float64():
    tensors = inputs("cpu", torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        out, lse = forward(*tensors)
    assert out.dtype == lse.dtype == torch.float64


def test_public_functions_under_autocast(device):
    tensors = inputs(device, torch.float32, k=(2, 4, 13, 16))
    low = [t.detach().bfloat16().requires_grad_() for t in tensors]
    with torch.autocast(device, torch.bfloat16), silent():
        out = scaled_dot_product_attention(*tensors)
    grad_out = torch.randn_like(out)
    out.backward(grad_out)
    scaled_dot_product_attention(*low).backward(grad_out)
    for tensor, other in zip(tensors, low, strict=True):
        assert tensor.grad.dtype == torch.float32
        close(tensor.grad.bfloat16(), other.grad, torch.bfloat16)


@pytest.mark.parametrize("mask", [None, "common", "mapped"])
def test_vmap_of_backward(device, mask):
    """One call with the mapped dimension in batch, equal to a loop; key is not mapped."""
    query, key, value = qkv(device, q=(3, 2, 4, 9, 16), k=(3, 2, 2, 13, 16))
    key = key[0]
    attn_mask = None
    if mask is not None:
        attn_mask = torch.rand(3, 2, 1, 9, 13, device=device) < 0.8
        attn_mask = attn_mask if mask == "mapped" else attn_mask[0]
    calls = [
        saved_of(query[i], key, value[i], *(() if mask is None else (attn_mask[i],)))
        if mask == "mapped"
        else saved_of(query[i], key, value[i], *(() if mask is None else (attn_mask,)))
        for i in range(3)
    ]
    stacked = [torch.stack(t) for t in zip(*calls, strict=True)]
    stacked[2] = key
    in_dims = [0, 0, None, 0, 0, 0]
    if mask is not None:
        stacked[6] = attn_mask
        in_dims.append(0 if mask == "mapped" else None)
    with Calls() as counted:
        gradients = torch.vmap(lambda *a: backward(*a, deterministic=True), in_dims=tuple(in_dims))(
            *stacked
        )
    assert len(counted.calls) == 1 and counted.calls[0]["deterministic"]
    for i, call in enumerate(calls):
        for ours, expected in zip(gradients, backward(*call), strict=True):
            close(ours[i], expected, torch.float16)


def test_vmap_of_forward_with_leaves(device):
    """Autograd outside of vmap."""
    tensors = inputs(device, q=(3, 2, 4, 9, 16), k=(3, 2, 4, 13, 16))
    flat = [t.detach().flatten(0, 1).requires_grad_() for t in tensors]
    out = torch.vmap(scaled_dot_product_attention)(*tensors)
    grad_out = torch.randn_like(out)
    out.backward(grad_out)
    scaled_dot_product_attention(*flat).backward(grad_out.flatten(0, 1))
    for tensor, other in zip(tensors, flat, strict=True):
        close(tensor.grad.flatten(0, 1), other.grad, torch.float16)


# --- torch.compile and torch.export ---------------------------------------------------------------


def block(query, key, value, attn_mask):
    masked = scaled_dot_product_attention(query, key, value, attn_mask, enable_gqa=True)
    causal = flash_attn_func(
        *(t.transpose(1, 2) for t in (query, key, value)), causal=True, window_size=(5, -1)
    )
    return masked + 2 * causal.transpose(1, 2)


@needs_compile
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiled_training(device, dynamic):
    """Forward and backward in one graph each, gradients and their strides as in eager mode."""
    counter = CompileCounterWithBackend("aot_eager")
    function = torch.compile(block, fullgraph=True, dynamic=dynamic, backend=counter)
    compilations = []
    for seqlen_q, seqlen_k, batch in ((9, 13, 3), (30, 17, 5), (5, 40, 7)):
        query = randn(batch, seqlen_q, 4, 16, device=device).transpose(1, 2).requires_grad_()
        key, value = (
            randn(batch, 2, seqlen_k, 16, device=device).requires_grad_() for _ in range(2)
        )
        mask = torch.rand(batch, 1, seqlen_q, seqlen_k, device=device) < 0.7
        grad_out = randn(batch, 4, 16, seqlen_q, device=device).mT
        results = []
        for call in (function, block):
            out = call(query, key, value, mask)
            results.append([out, *torch.autograd.grad(out, (query, key, value), grad_out)])
        for ours, expected in zip(*results, strict=True):
            assert ours.stride() == expected.stride()
            close(ours, expected, torch.float16)
        compilations.append(counter.frame_count)
    assert not dynamic or len(set(compilations)) == 1


@needs_compile
def test_compiled_for_inference_of_leaves(device):
    """Parameters require grad, grad mode is off: the graph holds no derivative."""
    tensors = inputs(device, k=(2, 4, 13, 16))
    function = torch.compile(scaled_dot_product_attention, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        out = function(*tensors)
    assert not out.requires_grad
    assert torch.equal(out, scaled_dot_product_attention(*tensors))


@needs_compile
def test_compiled_autograd(device):
    tensors = inputs(device, k=(2, 4, 13, 16))
    expected = torch.autograd.grad(forward(*tensors)[0].sum(), tensors)
    out = forward(*tensors)[0].sum()
    with compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
        out.backward()
    for tensor, gradient in zip(tensors, expected, strict=True):
        close(tensor.grad, gradient, torch.float16)


@needs_compile
def test_compiled_checkpointing(device):
    tensors = inputs(device, k=(2, 4, 13, 16))

    def attend(*tensors):
        return checkpoint(scaled_dot_product_attention, *tensors, use_reentrant=False).sum()

    expected = torch.autograd.grad(attend(*tensors), tensors)
    function = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for a, b in zip(torch.autograd.grad(function(*tensors), tensors), expected, strict=True):
        close(a, b, torch.float16)


@needs_compile
def test_export_of_a_module_with_parameters(device):
    """Training leaves no trace in an exported program: one call of our forward."""

    class Attention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.project = torch.nn.Linear(16, 48, device=device, dtype=torch.float16)

        def forward(self, x):
            q, k, v = self.project(x).unflatten(-1, (3, 1, 16)).unbind(2)
            return flash_attn_func(q, k, v, causal=True)

    module = Attention()
    x = randn(2, 9, 16, device=device)
    program = torch.export.export(module, (x,)).run_decompositions()
    assert sum(node.target is forward for node in program.graph.nodes) == 1
    torch.testing.assert_close(program.module()(x), module(x))


# --- CUDA streams and graphs ----------------------------------------------------------------------


@pytest.fixture
def cuda(device):
    if device == "cpu":
        pytest.skip("CUDA only")
    return device


def cuda_arguments(device):
    """What fa::backward takes for a call of each kind of kernel, and its options."""
    tensors = qkv(device, q=(2, 4, 300, 64), k=(2, 2, 260, 64))
    mask = torch.rand(2, 1, 300, 260, device=device) < 0.7
    for options, more in (
        ({}, ()),
        ({"is_causal": True, "bottom_right": True}, ()),
        ({"window_left": 40, "window_right": 3}, ()),
        ({"scale": -0.1}, ()),
        ({}, (mask,)),
    ):
        yield saved_of(*tensors, *more, **options), options


def test_graph_replay_with_new_data(cuda):
    for arguments, options in cuda_arguments(cuda):
        for deterministic in (False, True):
            options = {**options, "deterministic": deterministic}
            backward(*arguments, **options)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                gradients = backward(*arguments, **options)
            for _ in range(3):
                arguments[0].copy_(torch.randn_like(arguments[0]))
                for gradient in gradients:
                    gradient.fill_(torch.nan)
                graph.replay()
                for ours, expected in zip(gradients, backward(*arguments, **options), strict=True):
                    close(ours, expected, torch.float16)


def test_training_step_in_a_graph(cuda):
    tensors = inputs(cuda, q=(2, 4, 65, 64), k=(2, 4, 65, 64))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            scaled_dot_product_attention(*tensors, is_causal=True).sum().backward()
    torch.cuda.current_stream().wait_stream(stream)
    for tensor in tensors:
        tensor.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scaled_dot_product_attention(*tensors, is_causal=True).sum().backward()
    with torch.no_grad():
        tensors[0].copy_(torch.randn_like(tensors[0]))
    graph.replay()
    again = plain(tensors)
    scaled_dot_product_attention(*again, is_causal=True).sum().backward()
    for a, b in zip(tensors, again, strict=True):
        close(a.grad, b.grad, torch.float16)


def test_no_host_synchronisation(cuda):
    calls = list(cuda_arguments(cuda))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for arguments, options in calls:
            backward(*arguments, **options)
            backward(*arguments, **options, deterministic=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_side_stream(cuda):
    """The work is ordered after what was enqueued before it on the current stream, and only so."""
    for arguments, options in cuda_arguments(cuda):
        expected = backward(*arguments, **options)
        late = arguments[0].clone()
        arguments[0].zero_()
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)  # about 30 ms: on another stream it would run ahead
            arguments[0].copy_(late)
            gradients = backward(*arguments, **options)
            done = stream.record_event()
        assert not done.query()
        torch.cuda.current_stream().wait_stream(stream)
        for ours, other in zip(gradients, expected, strict=True):
            close(ours, other, torch.float16)


def test_gradient_right_behind_the_kernel_that_writes_it(cuda):
    """A launch that may begin before the one before has finished must wait for its results."""
    for arguments, options in cuda_arguments(cuda):
        grad_out = arguments[0].clone()
        expected = backward(*arguments, **options)
        for _ in range(20):
            arguments[0].fill_(torch.nan)
            arguments[0].copy_(grad_out)
            for ours, other in zip(backward(*arguments, **options), expected, strict=True):
                close(ours, other, torch.float16)


def test_device_other_than_current(cuda):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    for arguments, options in cuda_arguments("cuda:1"):
        gradients = backward(*arguments, **options)
        assert all(g.device == torch.device("cuda:1") for g in gradients)
        tensors = [arguments[i] for i in (1, 2, 3)]
        check_gradients(*tensors, *arguments[6:], grad_out=arguments[0], **options)
    assert torch.cuda.current_device() == 0


def test_operands_on_another_device(cuda):
    arguments = saved_of(*qkv(cuda))
    for i, name in enumerate(("grad_out", None, "key", "value", "out", "lse")):
        if name is not None:
            mixed = list(arguments)
            mixed[i] = mixed[i].cpu()
            match = rf"{name}: device must equal that of query \(cuda:0\), got cpu"
            with pytest.raises(RuntimeError, match=match):
                backward(*mixed)


def test_wide_types_on_cuda_are_refused_by_the_op(cuda):
    tensors = qkv(cuda, torch.float32)
    lse = torch.zeros(2, 4, 9, device=cuda)
    with pytest.raises(RuntimeError, match=r"query: dtype must be .*, got Float"):
        backward(tensors[0], *tensors, tensors[0], lse)


def test_padding_of_odd_head_dims_is_not_a_gradient(cuda):
    """Rows that are copied to be aligned are padded with zeros; nothing of it comes back."""
    tensors = qkv(cuda, q=(2, 4, 70, 33), k=(2, 2, 90, 33))
    tensors = [F.pad(t, (1, 2), value=torch.nan)[..., 1:-2] for t in tensors]
    check_gradients(*tensors)
