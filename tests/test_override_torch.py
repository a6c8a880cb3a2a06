"""What stands on top of F.scaled_dot_product_attention, with our kernels behind it: unchanged code,
and our kernels in it."""

import functools
import math

import pytest
import torch
import torch.nn.functional as F
from calls import assert_close
from overriding import kernels_of
from reference import assert_gradients_close, gradients_low, gradients_ref
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import flashattn_ext

sdpa = F.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def enabled(request):
    device = request.getfixturevalue("device")
    with flashattn_ext.enable(device):
        yield


def dtype_of(device):
    return torch.float32 if device == "cpu" else torch.bfloat16


def inputs(device, heads=(4, 4), seqlens=(40, 40), head_dim=16, dtype=None, requires_grad=False):
    dtype = dtype or dtype_of(device)
    pairs = list(zip(heads, seqlens, strict=True))
    shapes = [(2, seqlen, head, head_dim) for head, seqlen in (pairs[0], pairs[1], pairs[1])]
    tensors = [torch.randn(shape, device=device, dtype=dtype).transpose(1, 2) for shape in shapes]
    return [tensor.requires_grad_(requires_grad) for tensor in tensors]


def check_training(attention, query, key, value, kernels=(1, 1), mask=None, **options):
    """Result and gradients against the definition, from our kernels."""
    results = []
    grad_out = torch.randn_like(query)

    def run():
        out = attention(query, key, value)
        results.append((out, torch.autograd.grad(out, (query, key, value), grad_out)))

    assert kernels_of(run) == kernels
    out, gradients = results[0]
    tensors = [tensor.detach() for tensor in (query, key, value)]
    assert_close(out.detach(), *tensors, mask, **options)
    reference = gradients_ref(grad_out, *tensors, mask, **options)
    low = gradients_low(grad_out, *tensors, mask, **options)
    assert_gradients_close(gradients, reference, low, "training")


@pytest.mark.parametrize("seqlens", [(40, 40), (40, 70), (1, 30)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_eager(device, seqlens, is_causal):
    """The corner is the top-left one."""
    leaves = inputs(device, (4, 2), seqlens, requires_grad=True)
    attention = functools.partial(sdpa, is_causal=is_causal, enable_gqa=True)
    check_training(attention, *leaves, is_causal=is_causal)


@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_left_padding(device, kind):
    """Queries of the padding see no key: they give 0, on Hopper too, where torch's own cuDNN gives
    something else."""
    leaves = inputs(device, (4, 2), (40, 40), requires_grad=True)
    visible = torch.ones(40, 40, dtype=torch.bool, device=device).tril().repeat(2, 1, 1, 1)
    visible[0, ..., :9] = False
    mask = visible
    if kind == "additive":
        mask = torch.zeros(visible.shape, device=device, dtype=leaves[0].dtype)
        mask = mask.masked_fill(~visible, -math.inf)
    attention = functools.partial(sdpa, attn_mask=mask, enable_gqa=True)
    check_training(attention, *leaves, mask=visible)
    assert (attention(*leaves)[0, :, :9] == 0).all()


def test_low_scores_and_a_mask(device):
    """704 keys and scores of about -120, where torch's cuDNN gives gradients of NaN
    (pytorch/pytorch#196678)."""
    query, key, value = inputs(device, (1, 1), (704, 704), head_dim=64)
    leaves = [(query * 0.1 + 3.9), (key * 0.1 - 3.9), value]
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    visible = torch.rand(2, 1, 704, 704, device=device) < 0.9
    check_training(functools.partial(sdpa, attn_mask=visible), *leaves, mask=visible)


def test_lower_right_bias(device):
    """On CUDA torch gives it to the flash operator, which has that corner; else it makes a mask."""
    leaves = inputs(device, seqlens=(40, 70), requires_grad=True)
    attention = functools.partial(sdpa, attn_mask=causal_lower_right(40, 70))
    check_training(attention, *leaves, is_causal=True, bottom_right=True)


@pytest.mark.parametrize("mode", ["default", "dynamic"])
def test_compile(device, mode):
    torch.compiler.reset()

    def attention(query, key, value):
        return sdpa(query * 1, key, value, is_causal=True)

    compiled = torch.compile(
        attention,
        fullgraph=True,
        dynamic=mode == "dynamic" or None,
        backend="inductor" if device == "cuda" or mode == "default" else "aot_eager",  # 20 s
    )
    for seqlen in (40, 56) if mode == "dynamic" else (40,):
        leaves = inputs(device, seqlens=(seqlen, seqlen), requires_grad=True)
        compiled(*leaves).sum().backward()
        check_training(compiled, *leaves, is_causal=True)


def test_compiled_with_a_mask(device):
    torch.compiler.reset()
    leaves = inputs(device, requires_grad=True)
    visible = torch.rand(2, 1, 40, 40, device=device) < 0.5
    visible[0, :, 3] = False
    compiled = torch.compile(lambda q, k, v: sdpa(q, k, v, attn_mask=visible), fullgraph=True)
    compiled(*leaves).sum().backward()
    check_training(compiled, *leaves, mask=visible)


def test_autocast(device):
    query, key, value = inputs(device, dtype=torch.float32)

    def run():
        with torch.autocast(device, dtype=torch.bfloat16):
            return sdpa(query, key, value, is_causal=True)

    assert kernels_of(run) == (1, 0)
    out = run()
    assert out.dtype == torch.bfloat16
    assert_close(out, *(t.bfloat16() for t in (query, key, value)), is_causal=True)


def test_checkpoint(device):
    leaves = inputs(device, requires_grad=True)

    def attention(*tensors):
        return checkpoint(sdpa, *tensors, use_reentrant=False)

    check_training(attention, *leaves, kernels=(2, 1))


def test_vmap(device):
    query, key, value = (torch.randn_like(torch.stack([x] * 3)) for x in inputs(device))
    attention = torch.vmap(functools.partial(sdpa, is_causal=True))
    forwards, _ = kernels_of(lambda: attention(query, key, value))
    if device == "cuda":  # torch has no rule for its operator on CPUs, and loops
        assert forwards == 1
    out = attention(query, key, value)
    for i in range(3):
        assert_close(out[i], query[i], key[i], value[i], is_causal=True)


def test_derivatives_by_torch_func(device):
    query, key, value = inputs(device)
    grad_out = torch.randn_like(query)

    def loss(*tensors):
        return (sdpa(*tensors) * grad_out).sum()

    gradients = []
    function = torch.func.grad(loss, argnums=(0, 1, 2))
    assert kernels_of(lambda: gradients.extend(function(query, key, value))) == (1, 1)
    reference = gradients_ref(grad_out, query, key, value)
    assert_gradients_close(
        gradients, reference, gradients_low(grad_out, query, key, value), "torch.func"
    )


def test_flop_counter(device):
    leaves = inputs(device, requires_grad=True)

    def count():
        with FlopCounterMode(display=False) as counter:
            sdpa(*leaves).sum().backward()
        return counter.get_total_flops()

    flops = count()
    assert flops == count()
    flashattn_ext.disable()
    assert flops == count()
    if device == "cuda":  # torch counts no fused operator of CPUs
        assert flops > 0


def test_what_ours_do_not_take_runs_as_before(device):
    """Bit by bit, and without a word."""
    query, key, value = inputs(device, head_dim=264)
    query, key, value = (tensor * 0.5 for tensor in (query, key, value))

    def run():
        leaves = [t.detach().requires_grad_() for t in (query, key, value)]
        out = sdpa(*leaves, is_causal=True)
        return out, *torch.autograd.grad(out.sum(), leaves)

    assert kernels_of(run) == (0, 0)
    ours = run()
    flashattn_ext.disable()
    assert all(a.equal(b) for a, b in zip(ours, run(), strict=True))


def test_dropout_runs_as_before(device):
    leaves = inputs(device, requires_grad=True)

    def run():
        torch.manual_seed(0)
        out = sdpa(*leaves, dropout_p=0.3)
        return out, *torch.autograd.grad(out.sum(), leaves)

    assert kernels_of(run) == (0, 0)
    ours = run()
    flashattn_ext.disable()
    for a, b in zip(ours, run(), strict=True):
        torch.testing.assert_close(a, b)


def test_choice_stays_with_torch(device):
    query, key, value = inputs(device)
    with sdpa_kernel(SDPBackend.MATH):
        assert kernels_of(lambda: sdpa(query, key, value)) == (0, 0)
    backends = [SDPBackend.FLASH_ATTENTION]
    if device == "cuda":
        backends += [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
    for backend in backends:
        with sdpa_kernel(backend):
            assert kernels_of(lambda: sdpa(query, key, value)) == (1, 0), backend


def test_modules_of_torch(device):
    """torch.nn.MultiheadAttention and a transformer layer in training."""
    dtype = dtype_of(device)
    layer = torch.nn.TransformerEncoderLayer(
        64, 4, 64, dropout=0.0, batch_first=True, device=device, dtype=dtype
    )
    x = torch.randn(2, 20, 64, device=device, dtype=dtype)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(20, device=device, dtype=dtype)

    def run():
        layer(x, src_mask=mask, is_causal=True).sum().backward()

    assert kernels_of(run) == (1, 1)


def test_graph_capture(device):
    if device == "cpu":
        pytest.skip("CUDA graphs")
    tensors = inputs(device)
    sdpa(*tensors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sdpa(*tensors, is_causal=True)
    for tensor in tensors:
        tensor.copy_(torch.randn_like(tensor))
    graph.replay()
    assert_close(out, *tensors, is_causal=True)


@pytest.mark.parametrize("ours_first", [True, False])
def test_forward_and_backward_on_different_sides(device, ours_first):
    """Ours and torch's understand each other's results."""
    leaves = inputs(device, requires_grad=True)
    if not ours_first:
        flashattn_ext.disable()
    out = sdpa(*leaves, is_causal=True)
    if ours_first:
        flashattn_ext.disable()
    else:
        flashattn_ext.enable(device)
    grad_out = torch.randn_like(out)
    gradients = []
    kernels = kernels_of(lambda: gradients.extend(torch.autograd.grad(out, leaves, grad_out)))
    assert kernels == (0, 0 if ours_first else 1)
    tensors = [leaf.detach() for leaf in leaves]
    reference = gradients_ref(grad_out, *tensors, is_causal=True)
    low = gradients_low(grad_out, *tensors, is_causal=True)
    assert_gradients_close(gradients, reference, low, "two sides")
