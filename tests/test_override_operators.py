"""Each fused attention operator of torch with our kernels behind it: results, gradients, layouts.

Those for CUDA run on the CPU too: the same code registers our kernels for either.
"""

import math
from inspect import signature

import pytest
import torch
from calls import assert_close
from overriding import (
    BOTTOM_RIGHT,
    FOR_CPU,
    MASKED,
    OPERATORS,
    backward_name,
    call,
    kernels_of,
    lse_of,
    operator,
    out_of,
    overridden,
)
from reference import (
    assert_close_to_reference,
    assert_gradients_close,
    attention_low,
    attention_ref,
    gradients_low,
    gradients_ref,
)
from torch.nn.attention.varlen import varlen_attn

LAYOUTS = {
    "contiguous": lambda x: x,
    "seqlen first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "heads last": lambda x: x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
}


def inputs(device, heads=(4, 2), seqlens=(37, 70), head_dim=24, layout="seqlen first"):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    shapes = [(h, s) for h, s in zip(heads, seqlens, strict=True)]
    return [
        LAYOUTS[layout](torch.randn(2, *shape, head_dim, device=device, dtype=dtype))
        for shape in (shapes[0], shapes[1], shapes[1])
    ]


def check(name, device, query, key, value, mask=None, *, reference_mask=None, **options):
    """Results and gradients by autograd, against the definition."""
    leaves = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
    grad_out = torch.randn_like(query)
    with overridden(name, device):
        results = call(name, *leaves, mask, **options)
        out = out_of(name, results)
        gradients = torch.autograd.grad(out, leaves, grad_out)
    if reference_mask is None:
        reference_mask = mask
    arguments = (query, key, value, reference_mask)
    options["bottom_right"] = name in BOTTOM_RIGHT
    reference, low = attention_ref(*arguments, **options), attention_low(*arguments, **options)
    lse = lse_of(results, query.shape[2])
    assert_close_to_reference(out.detach(), lse, reference, low, name)
    reference = gradients_ref(grad_out, *arguments, **options)
    low = gradients_low(grad_out, *arguments, **options)
    assert_gradients_close(gradients, reference, low, name)


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("seqlens", [(37, 70), (70, 37), (64, 64), (1, 50)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_results(device, name, seqlens, is_causal):
    """On rectangles the causal corner decides; rows above the bottom-right one see no key."""
    query, key, value = inputs(device, seqlens=seqlens)
    check(name, device, query, key, value, is_causal=is_causal, scale=0.3)


@pytest.mark.parametrize("name", [*MASKED, FOR_CPU])
@pytest.mark.parametrize("dtype", ["query", "float32", "bool"])
@pytest.mark.parametrize("shape", [(37, 70), (2, 1, 1, 70), (2, 4, 37, 70)])
def test_masks(device, name, dtype, shape):
    query, key, value = inputs(device)
    mask = torch.rand(shape, device=device) < 0.7
    if dtype != "bool":
        mask = torch.randn(shape, device=device).masked_fill(~mask, -math.inf)
        mask = mask.to(query.dtype if dtype == "query" else torch.float32)
    check(name, device, query, key, value, mask)
    check(name, device, query, key, value, mask, is_causal=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_cudnn_is_given_for_a_bool_mask(device, dtype):
    """torch fills such masks with -65504: a query that sees no key gives 0 all the same."""
    name = "_scaled_dot_product_cudnn_attention"
    query, key, value = (tensor.to(dtype) for tensor in inputs(device))
    visible = torch.rand(2, 1, 37, 70, device=device) < 0.5
    visible[:, :, :9] = False
    zero = torch.zeros((), dtype=dtype, device=device)
    filled = torch.where(visible, zero, -65504.0)
    assert filled.dtype == dtype
    check(name, device, query, key, value, filled, reference_mask=visible)
    # Along what is broadcast the mask stays so.
    row = filled[:, :, 20:21].expand(2, 4, 37, 70)
    check(name, device, query, key, value, row, reference_mask=visible[:, :, 20:21])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_low_numbers_stay_numbers(device, dtype):
    if device == "cuda" and dtype == torch.float32:
        pytest.skip("half precision only")
    query, key, value = (tensor.to(dtype) for tensor in inputs(device))
    mask = torch.full((37, 70), torch.finfo(torch.bfloat16).min, device=device, dtype=dtype)
    check("_scaled_dot_product_cudnn_attention", device, query, key, value, mask)


@pytest.mark.parametrize("window", [(5, 3), (None, 2), (-1, -1), (4, None)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_windows(device, window, is_causal):
    query, key, value = inputs(device)
    left, right = (-1 if side is None else side for side in window)
    with overridden("_flash_attention_forward", device):
        results = call(
            "_flash_attention_forward",
            query,
            key,
            value,
            is_causal=is_causal,
            window_size_left=window[0],
            window_size_right=window[1],
        )
    options = {"window_left": left, "window_right": right, "is_causal": is_causal}
    options["bottom_right"] = True
    arguments = (query, key, value, None)
    reference, low = attention_ref(*arguments, **options), attention_low(*arguments, **options)
    out = results[0].transpose(1, 2)
    assert_close_to_reference(out, results[1], reference, low, "window")


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (3, 2)])
def test_packed_sequences(device, window):
    """torch's varlen_attn: each sequence as if it were alone."""
    lengths = ((5, 7), (0, 2), (12, 8), (13, 23))
    ends = torch.tensor([(0, 0), *lengths]).cumsum(0).int().to(device)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    tokens, tokens_k = ends[-1].tolist()
    shapes = [(tokens, 4, 16), (tokens_k, 2, 16), (tokens_k, 2, 16)]
    leaves = [torch.randn(s, device=device, dtype=dtype).requires_grad_() for s in shapes]
    with overridden("_flash_attention_forward", device):
        cum_seq_q, cum_seq_k = ends.T.contiguous()
        # torch 2.11 takes grouped heads without being told.
        told = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
        out = varlen_attn(*leaves, cum_seq_q, cum_seq_k, 13, 23, window_size=window, **told)
        grad_out = torch.randn_like(out)
        gradients = torch.autograd.grad(out, leaves, grad_out)
    options = {"window_left": window[0], "window_right": window[1], "bottom_right": True}

    def sequences(tensor, column):
        parts = tensor.detach().split([length[column] for length in lengths])
        return [part.transpose(0, 1).unsqueeze(0) for part in parts]

    columns = (0, 1, 1)
    inputs_of = zip(*(sequences(x, c) for x, c in zip(leaves, columns, strict=True)), strict=True)
    grads_of = zip(*(sequences(x, c) for x, c in zip(gradients, columns, strict=True)), strict=True)
    outs, grad_outs = sequences(out, 0), sequences(grad_out, 0)
    for tensors, result, grad, its_gradients in zip(
        inputs_of, outs, grad_outs, grads_of, strict=True
    ):
        assert_close(result, *tensors, **options)
        reference = gradients_ref(grad, *tensors, None, **options)
        low = gradients_low(grad, *tensors, None, **options)
        assert_gradients_close(its_gradients, reference, low, "packed")


def metadata(results):
    """What compiled code relies on; the rest is None or a number in torch's own results too."""
    return [
        (tuple(x.shape), x.stride(), x.dtype) if isinstance(x, torch.Tensor) else x for x in results
    ]


def backward_arguments(name, grad_out, query, key, value, results, mask):
    """Of the backward operator of a call without options."""
    out, lse = results[:2]
    if name == FOR_CPU:
        return (grad_out, query, key, value, out, lse, 0.0, False), {"attn_mask": mask}
    if name == "_flash_attention_forward":
        lengths = (query.shape[1], key.shape[1])
        arguments = (grad_out, query, key, value, out, lse, None, None, *lengths, 0.0, False)
        return (*arguments, *results[2:4]), {}
    lengths = (query.shape[2], key.shape[2])
    if name == "_scaled_dot_product_flash_attention":
        arguments = (grad_out, query, key, value, out, lse, None, None, *lengths, 0.0, False)
        return (*arguments, *results[6:8]), {}
    if name == "_scaled_dot_product_cudnn_attention":
        arguments = (grad_out, query, key, value, out, lse, *results[6:8], mask, None, None)
        return (*arguments, *lengths, 0.0, False), {}
    needed = [True, True, True, False]
    return (grad_out, query, key, value, mask, out, lse, *results[2:4], 0.0, needed), {}


def to_meta(x):
    return x.to("meta") if isinstance(x, torch.Tensor) else x


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seqlens", [(37, 70), (64, 32)])
def test_layouts_are_those_of_the_meta_functions(device, name, layout, seqlens):
    query, key, value = inputs(device, heads=(4, 4), seqlens=seqlens, layout=layout)
    mask = None
    if name in (*MASKED, FOR_CPU):
        mask = torch.randn(2, 4, *seqlens, device=device, dtype=query.dtype)
    with overridden(name, device):
        results = call(name, query, key, value, mask)
        expected = call(name, *map(to_meta, (query, key, value, mask)))
        assert metadata(results) == metadata(expected)
        if name == "_flash_attention_forward":
            query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
        grad_out = torch.randn(results[0].shape, dtype=query.dtype).to(device)
        arguments, options = backward_arguments(name, grad_out, query, key, value, results, mask)
        backward = operator(backward_name(name))
        gradients = backward(*arguments, **options)
        expected = backward(
            *map(to_meta, arguments), **{key: to_meta(x) for key, x in options.items()}
        )
        assert metadata(gradients) == metadata(expected)


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("seqlens", [(0, 5), (5, 0)])
def test_without_queries_or_keys(device, name, seqlens):
    """Queries without keys give 0; gradients of keys without queries are 0."""
    leaves = [x.requires_grad_() for x in inputs(device, heads=(4, 4), seqlens=seqlens)]
    with overridden(name, device):
        out = out_of(name, call(name, *leaves))
        gradients = torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert out.shape == leaves[0].shape and (out == 0).all()
    assert all((gradient == 0).all() for gradient in gradients)


def test_efficient_attention_without_lse(device):
    name = "_scaled_dot_product_efficient_attention"
    query, key, value = inputs(device, heads=(2, 2))
    with overridden(name, device):
        results = operator(name)(query, key, value, None, False)
        expected = operator(name)(*map(to_meta, (query, key, value)), None, False)
    assert metadata(results) == metadata(expected)


# Calls that our kernels do not take: the forward and the backward go to torch's kernel. Each is a
# change of the tensors, or options.
UNSUPPORTED = {
    "dropout": lambda q, k, v: ((q, k, v), {"dropout_p": 0.5}),
    "head_dim of value": lambda q, k, v: ((q, k, v[..., :16]), {}),
    "large head_dim": lambda q, k, v: ([x.repeat(1, 1, 1, 11) for x in (q, k, v)], {}),
    "dtypes that differ": lambda q, k, v: ((q, k.double(), v.double()), {}),
    "batch of key": lambda q, k, v: ((q, k[:1], v[:1]), {}),
}


@pytest.mark.parametrize("name", [name for name in OPERATORS if name != FOR_CPU])
@pytest.mark.parametrize("reason", UNSUPPORTED)
def test_what_ours_do_not_take(name, reason):
    """With stand-ins, so that it is seen which kernel was called."""
    (query, key, value), options = UNSUPPORTED[reason](*inputs("cpu", heads=(4, 4)))
    leaves = [tensor.detach().requires_grad_() for tensor in (query, key, value)]

    def run():
        out = out_of(name, call(name, *leaves, **options))
        out.backward(torch.ones_like(out))

    with overridden(name, "cpu") as stock:
        assert kernels_of(run) == (0, 0)
        assert stock.calls == {name: 1, backward_name(name): 1}
        assert (leaves[0].grad == 7).all()


def test_options_that_ours_do_not_take():
    query, key, value = inputs("cpu")
    slopes, lengths = torch.ones(4), torch.tensor([3, 4], dtype=torch.int32)
    for name, options in (
        ("_scaled_dot_product_flash_attention", {"return_debug_mask": True}),
        ("_scaled_dot_product_cudnn_attention", {"return_debug_mask": True}),
        ("_flash_attention_forward", {"return_debug_mask": True}),
        ("_flash_attention_forward", {"alibi_slopes": slopes}),
        ("_flash_attention_forward", {"seqused_k": lengths}),
    ):
        with overridden(name, "cpu") as stock:
            call(name, query, key, value, **options)
            assert stock.calls == {name: 1}, options
            call(name, query, key, value)
            assert stock.calls == {name: 1}


@pytest.mark.parametrize("told", [True, False])
def test_a_mask_that_requires_grad(told):
    """torch's backward for it takes results of torch's forward, also where the forward could not
    know: compiled code detaches its inputs."""
    name = "_scaled_dot_product_efficient_attention"
    query, key, value = inputs("cpu", heads=(4, 4))
    mask = torch.zeros(2, 4, 37, 70, requires_grad=told)
    with overridden(name, "cpu") as stock:
        results = call(name, query, key, value, mask)
        assert stock.calls[name] == told
        arguments, _ = backward_arguments(name, query, query, key, value, results, mask)
        gradients = operator(backward_name(name))(*arguments[:-1], [True, True, True, True])
        assert stock.calls == {name: 1, backward_name(name): 1}
        assert gradients[3].shape == mask.shape
        # As the engine asks when only query wants a gradient: as the forward went.
        operator(backward_name(name))(*arguments)
        assert stock.calls[backward_name(name)] == 1 + told


def test_deterministic(device):
    """torch's switch reaches our backward: it repeats bit by bit."""
    name = "_scaled_dot_product_flash_attention"
    leaves = [x.requires_grad_() for x in inputs(device, seqlens=(500, 700), head_dim=64)]
    torch.use_deterministic_algorithms(True)
    try:
        with overridden(name, device):
            out = call(name, *leaves)[0]
            grad_out = torch.randn_like(out)
            first, *others = (
                torch.autograd.grad(out, leaves, grad_out, retain_graph=True) for _ in range(5)
            )
    finally:
        torch.use_deterministic_algorithms(False)
    for other in others:
        assert all(a.equal(b) for a, b in zip(first, other, strict=True))


def test_names_and_keys_that_do_not_exist():
    Override = torch.classes.fa.Override
    with pytest.raises(RuntimeError, match=r"operators: must be fused attention .* got no_such"):
        Override("CPU", ["no_such"])
    with pytest.raises(RuntimeError, match=r"must have a kernel for CPU .* got none"):
        Override("CPU", ["_scaled_dot_product_cudnn_attention"])
