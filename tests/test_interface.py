"""scaled_dot_product_attention: torch's meaning and errors, and calls left to torch."""

import contextlib
import inspect
import warnings

import pytest
import torch
import torch.nn.functional as F
from calls import OperatorLog, assert_close, qkv, randn, silent, torch_sdpa, warns_once
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.testing._internal.two_tensor import TwoTensor

import flashattn_ext
from flashattn_ext import flash_attn_func, interface, scaled_dot_product_attention

# --- scaled_dot_product_attention: torch's meaning ---------------------------------------------


def test_signature_is_torchs():
    schema = torch.ops.aten.scaled_dot_product_attention.default._schema
    theirs = [
        (a.name, a.default_value if a.has_default_value() else inspect.Parameter.empty)
        for a in schema.arguments
    ]
    ours = inspect.signature(scaled_dot_product_attention).parameters.values()
    assert [(p.name, p.default) for p in ours] == theirs


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"scale": 0.3},
        {"scale": -0.7},
        {"scale": 2},
        {"dropout_p": 0.0, "enable_gqa": False},
    ],
    ids=str,
)
def test_options(device, dtype, options, request):
    if device == "cuda" and dtype in (torch.float32, torch.float64):
        pytest.skip("float32 and float64 on CUDA are torch's; see test_goes_to_torch")
    query, key, value = qkv(device, dtype)
    with silent(), OperatorLog() as log:
        out = scaled_dot_product_attention(query, key, value, **options)
    assert log.ran_ours()
    semantic = {name: options[name] for name in ("is_causal", "scale") if name in options}
    assert_close(out, query, key, value, **semantic)


# Top-left: without it, more keys than queries and the reverse would see other keys.
@pytest.mark.parametrize("lengths", [(2, 5), (1, 5), (5, 2)], ids=str)
def test_causal_is_top_left(device, lengths):
    query, key, value = qkv(device, q=(1, 2, lengths[0], 16), k=(1, 2, lengths[1], 16))
    out = scaled_dot_product_attention(query, key, value, is_causal=True)
    assert_close(out, query, key, value, is_causal=True)
    assert torch.equal(out[:, :, 0], value[:, :, 0])


@pytest.mark.parametrize("heads", [(8, 2), (6, 1), (4, 4)], ids=str)
def test_grouped_heads(device, heads):
    query, key, value = qkv(device, q=(2, heads[0], 9, 16), k=(2, heads[1], 13, 16))
    with OperatorLog() as log:
        out = scaled_dot_product_attention(query, key, value, enable_gqa=True)
    assert_close(out, query, key, value)
    # The heads go to the kernel as they are.
    assert log.operators == [torch.ops.fa.forward.default]


MASKS = {
    "bool": lambda device: torch.rand(9, 13, device=device) < 0.7,
    "bool 4-D": lambda device: torch.rand(2, 4, 9, 13, device=device) < 0.7,
    "bool row": lambda device: torch.rand(13, device=device) < 0.7,
    "bool scalar": lambda device: torch.tensor(True, device=device),
    "element": lambda device: randn(2, 1, 1, 13, device=device),
    "float32": lambda device: randn(4, 9, 1, device=device, dtype=torch.float32),
    "hidden rows": lambda device: (torch.arange(9, device=device) % 2 == 0)[:, None],
}


@pytest.mark.parametrize("mask", MASKS)
def test_masks(device, mask):
    query, key, value = qkv(device)
    attn_mask = MASKS[mask](device)
    with silent():
        out = scaled_dot_product_attention(query, key, value, attn_mask)
    assert_close(out, query, key, value, attn_mask)


def test_mask_beside_float64_may_be_float32():
    query, key, value = qkv("cpu", torch.float64)
    attn_mask = randn(9, 13, dtype=torch.float32)
    out = scaled_dot_product_attention(query, key, value, attn_mask)
    torch.testing.assert_close(out, torch_sdpa(query, key, value, attn_mask.double()))


# Shapes of query, key, value, mask; torch's own rules say what they mean.
RANKS = {
    "2-D": ((9, 16), (13, 16), (13, 16), (9, 13)),
    "3-D": ((4, 9, 16), (4, 13, 16), (4, 13, 16), (4, 9, 13)),
    "3-D, 2-D mask": ((4, 9, 16), (4, 13, 16), (4, 13, 16), (1, 13)),
    "5-D": ((3, 2, 4, 9, 16), (3, 2, 4, 13, 16), (3, 2, 4, 13, 16), (3, 1, 4, 1, 13)),
    "5-D, 3-D mask": ((3, 2, 4, 9, 16), (3, 2, 4, 13, 16), (3, 2, 4, 13, 16), (4, 9, 13)),
    "5-D, 4-D mask": ((3, 2, 4, 9, 16), (3, 2, 4, 13, 16), (3, 2, 4, 13, 16), (2, 1, 9, 13)),
    "6-D": ((2, 3, 2, 2, 9, 16), (2, 3, 2, 2, 13, 16), (2, 3, 2, 2, 13, 16), (1, 13)),
    "batch of key": ((2, 4, 9, 16), (1, 4, 13, 16), (1, 4, 13, 16), (2, 1, 9, 13)),
    "batch of value": ((2, 4, 9, 16), (2, 4, 13, 16), (1, 4, 13, 16), (9, 13)),
    "batch of query": ((1, 4, 9, 16), (2, 4, 13, 16), (2, 4, 13, 16), (2, 4, 1, 1)),
    "heads of key": ((2, 4, 9, 16), (2, 1, 13, 16), (2, 4, 13, 16), (4, 1, 13)),
    "heads of key and value": ((2, 4, 9, 16), (2, 1, 13, 16), (2, 1, 13, 16), (4, 1, 13)),
    "heads of query": ((2, 1, 9, 16), (2, 4, 13, 16), (2, 4, 13, 16), (2, 4, 9, 13)),
    "5-D broadcast": ((3, 2, 4, 9, 16), (1, 2, 4, 13, 16), (3, 1, 4, 13, 16), (1, 2, 1, 9, 13)),
    "mixed ranks": ((4, 9, 16), (2, 4, 13, 16), (13, 16), (2, 1, 9, 13)),
    "2-D query": ((9, 16), (2, 4, 13, 16), (2, 4, 13, 16), (9, 13)),
    "no batch": ((0, 4, 9, 16), (0, 4, 13, 16), (0, 4, 13, 16), (9, 13)),
    "5-D without batch": ((3, 0, 4, 9, 16), (3, 0, 4, 13, 16), (3, 0, 4, 13, 16), (9, 13)),
    "no query": ((2, 4, 0, 16), (2, 4, 13, 16), (2, 4, 13, 16), (1, 13)),
    "no key": ((2, 4, 9, 16), (2, 4, 0, 16), (2, 4, 0, 16), (9, 1)),
}


@pytest.mark.parametrize("with_mask", [False, True], ids=["", "mask"])
@pytest.mark.parametrize("case", RANKS)
def test_ranks_and_broadcasting(device, case, with_mask):
    q_shape, k_shape, v_shape, mask_shape = RANKS[case]
    query, key, value = qkv(device, q=q_shape, k=k_shape, v=v_shape)
    attn_mask = torch.rand(mask_shape, device=device) < 0.7 if with_mask else None
    with silent(), OperatorLog() as log:
        out = scaled_dot_product_attention(query, key, value, attn_mask)
    assert log.ran_ours()
    lead = torch.broadcast_shapes(q_shape[:-2], k_shape[:-2], v_shape[:-2])
    assert out.shape == (*lead, q_shape[-2], v_shape[-1])
    batch = lead[:-1].numel() if len(lead) else 1
    heads = lead[-1] if len(lead) else 1
    four = [
        t.expand(*lead, *t.shape[-2:]).reshape(batch, heads, *t.shape[-2:])
        for t in (query, key, value)
    ]
    if with_mask:
        scores = (*lead, q_shape[-2], k_shape[-2])
        attn_mask = attn_mask.expand(scores).reshape(batch, heads, *scores[-2:])
    if out.numel():
        assert_close(out.reshape(four[0].shape), *four, attn_mask)


def test_mask_of_batch_one_for_3d_inputs(device):
    """Newer versions of torch take it."""
    query, key, value = qkv(device, q=(4, 9, 16), k=(4, 13, 16))
    attn_mask = torch.rand(1, 4, 9, 13, device=device) < 0.7
    out = scaled_dot_product_attention(query, key, value, attn_mask)
    assert torch.equal(out, scaled_dot_product_attention(query, key, value, attn_mask[0]))


def test_grouped_heads_of_other_ranks(device):
    query, key, value = qkv(device, q=(3, 2, 8, 9, 16), k=(3, 1, 4, 13, 16))
    out = scaled_dot_product_attention(query, key, value, enable_gqa=True)
    keys, values = (t.expand(3, 2, -1, -1, -1).flatten(0, 1) for t in (key, value))
    assert_close(out.flatten(0, 1), query.flatten(0, 1), keys, values)
    three = scaled_dot_product_attention(query[0, 0], key[0, 0], value[0, 0], enable_gqa=True)
    assert_close(three[None], query[0, :1], key[0], value[0])


def test_folding_copies_nothing(device):
    """Leading dimensions that merge by strides reach the kernel in place."""
    query, key, value = qkv(device, q=(3, 2, 4, 9, 16), k=(3, 2, 1, 13, 16))
    attn_mask = torch.rand(1, 1, 4, 9, 13, device=device) < 0.7
    with OperatorLog() as log:
        scaled_dot_product_attention(query, key, value, attn_mask)
    allocating = {torch.ops.aten.clone.default, torch.ops.aten._unsafe_view.default}
    assert log.ran_ours() and not allocating & set(log.operators)


def test_output_layout_follows_query(device):
    layouts = [(0, 1, 2, 3), (0, 2, 1, 3), (2, 1, 0, 3), (1, 0, 2, 3)]
    for order in layouts:
        shape = (2, 3, 5, 16)
        back = sorted(range(4), key=order.__getitem__)
        query = randn(*(shape[i] for i in order), device=device).permute(back)
        key = randn(2, 3, 7, 16, device=device)
        out = scaled_dot_product_attention(query, key, key)
        assert query.shape == shape and out.stride() == torch.empty_like(query).stride()
        assert_close(out, query, key, key)


def test_nan_in_live_input_shows(device):
    query, key, value = qkv(device)
    query[1, 2, 3, 4] = torch.nan
    out = scaled_dot_product_attention(query, key, value)
    expected = torch.zeros_like(out, dtype=torch.bool)
    expected[1, 2, 3] = True
    assert torch.equal(out.isnan(), expected)


# --- causal biases -----------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [(9, 13), (13, 9), (9, 9)], ids=str)
def test_causal_biases(device, lengths):
    query, key, value = qkv(device, q=(2, 4, lengths[0], 16), k=(2, 2, lengths[1], 16))
    for make, bottom_right in ((causal_upper_left, False), (causal_lower_right, True)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, about rows without a key
            bias = make(*lengths)
        with silent(), OperatorLog() as log:
            out = scaled_dot_product_attention(query, key, value, bias, enable_gqa=True)
        assert log.ran_ours()
        assert_close(out, query, key, value, is_causal=True, bottom_right=bottom_right)


def test_causal_bias_of_equal_lengths_is_top_left():
    """torch reads it so, whatever the lengths of query and key."""
    query, key, value = qkv("cpu", torch.float64)
    bias = causal_lower_right(4, 4)
    out = scaled_dot_product_attention(query, key, value, bias)
    torch.testing.assert_close(out, torch_sdpa(query, key, value, bias))
    assert torch.equal(out, scaled_dot_product_attention(query, key, value, is_causal=True))


def test_causal_bias_in_a_call_for_torch(nothing_said):
    query, key, value = qkv("cpu", torch.float64, v=(2, 4, 13, 24))
    with warns_once("head_dim of value"):
        out = scaled_dot_product_attention(query, key, value, causal_lower_right(9, 13))
        upper = scaled_dot_product_attention(query, key, value, causal_upper_left(9, 13))
    visible = torch.ones(9, 13, dtype=torch.bool).tril(4)
    torch.testing.assert_close(out, torch_sdpa(query, key, value, visible))
    torch.testing.assert_close(upper, torch_sdpa(query, key, value, visible.tril(0)))


def test_causal_bias_errors():
    query, key, value = qkv("cpu")
    bias = causal_lower_right(9, 13)
    for function in (scaled_dot_product_attention, torch_sdpa):
        with pytest.raises(ValueError, match="CausalBias"):
            function(query, key, value, bias, is_causal=True)
    wrong = causal_lower_right(4, 5)
    with pytest.raises(RuntimeError):
        torch_sdpa(query, key, value, wrong)
    with pytest.raises(RuntimeError, match=r"attn_mask: .* lengths \(9, 13\) .* got \(4, 5\)"):
        scaled_dot_product_attention(query, key, value, wrong)


# --- errors ------------------------------------------------------------------------------------

# Arguments that torch refuses, and what our message says.
BAD_CALLS = {
    "mask and causal": (
        lambda q, k, v: ((q, k, v, torch.ones(9, 13, dtype=torch.bool)), {"is_causal": True}),
        r"attn_mask: .*is_causal=True",
    ),
    "fewer heads without enable_gqa": (
        lambda q, k, v: ((q, k[:, :2], v[:, :2]), {}),
        r"key: heads must equal .*enable_gqa=True; got query \(2, 4, 9, 16\), key \(2, 2, 13, 16\)",
    ),
    "heads that do not divide": (
        lambda q, k, v: ((q, k[:, :3], v[:, :3]), {"enable_gqa": True}),
        r"key: heads must divide those of query \(4\), got 3",
    ),
    "more heads of key": (
        lambda q, k, v: ((q[:, :2], k, v), {"enable_gqa": True}),
        r"key: heads must divide those of query \(2\), got 4",
    ),
    "batch": (
        lambda q, k, v: ((q[:1].expand(3, -1, -1, -1), k, v), {}),
        r"batch must be equal or broadcast, got shapes \(3, 4, 9, 16\), \(2, 4, 13, 16\)",
    ),
    "head_dim": (
        lambda q, k, v: ((q[..., :8], k, v), {}),
        r"key: head_dim must equal that of query \(8\), got 16",
    ),
    "1-D": (
        lambda q, k, v: ((q[0, 0, 0], k[0, 0, 0], v[0, 0, 0]), {}),
        r"at least 2 dimensions, got \(1, 1, 1\)",
    ),
    "0-D": (
        lambda q, k, v: ((q[0, 0, 0, 0], k, v), {}),
        r"at least 2 dimensions, got \(0, 4, 4\)",
    ),
    "dtype of key": (
        lambda q, k, v: ((q, k.bfloat16(), v), {}),
        r"key: dtype must equal that of query \(Half\), got BFloat16",
    ),
    "dtype of value": (
        lambda q, k, v: ((q, k, v.bfloat16()), {}),
        r"value: dtype must equal that of query \(Half\), got BFloat16",
    ),
    "device of key": (
        lambda q, k, v: ((q, k.to("meta"), v), {}),
        r"key: device must equal that of query \(c.*\), got meta",
    ),
    "integer mask": (
        lambda q, k, v: ((q, k, v, torch.ones(9, 13, dtype=torch.int32, device=q.device)), {}),
        r"attn_mask: dtype must be bool, float32 or that of query \(Half\), got Int",
    ),
    "half mask of the other kind": (
        lambda q, k, v: ((q, k, v, q.new_zeros(9, 13).bfloat16()), {}),
        r"attn_mask: dtype must be bool, float32 or that of query \(Half\), got BFloat16",
    ),
    "float64 mask": (
        lambda q, k, v: ((q, k, v, q.new_zeros(9, 13).double()), {}),
        r"attn_mask: dtype must be bool, float32 or that of query \(Half\), got Double",
    ),
    "mask too narrow": (
        lambda q, k, v: ((q, k, v, q.new_zeros(9, 12)), {}),
        r"attn_mask: shape must broadcast to .* = \(2, 4, 9, 13\), got \(9, 12\)",
    ),
    "mask aligned to the wrong dimension": (
        lambda q, k, v: ((q, k, v, q.new_zeros(2, 9, 13)), {}),
        r"attn_mask: shape must broadcast to .* = \(2, 4, 9, 13\), got \(2, 9, 13\)",
    ),
    "mask of a larger batch": (
        lambda q, k, v: ((q[:1], k[:1], v[:1], q.new_zeros(2, 4, 9, 13)), {}),
        r"attn_mask: shape must broadcast to .* = \(1, 4, 9, 13\), got \(2, 4, 9, 13\)",
    ),
    "mask of a higher rank": (
        lambda q, k, v: ((q, k, v, q.new_zeros(1, 1, 4, 9, 13)), {}),
        r"attn_mask: shape must broadcast to .* = \(2, 4, 9, 13\), got \(1, 1, 4, 9, 13\)",
    ),
    "mask of a batch for 3-D inputs": (
        lambda q, k, v: ((q[0], k[0], v[0], q.new_zeros(2, 4, 9, 13)), {}),
        r"attn_mask: shape must broadcast to .* = \(1, 4, 9, 13\), got \(2, 4, 9, 13\)",
    ),
    "5-D mask": (
        lambda q, k, v: ((q[None], k[None], v[None], q.new_zeros(3, 2, 4, 9, 13)), {}),
        r"attn_mask: shape must broadcast to \(1, 2, 4\) and .*, got \(3, 2, 4, 9, 13\)",
    ),
    "6-D mask for 5-D inputs": (
        lambda q, k, v: ((q[None], k[None], v[None], q.new_zeros(1, 1, 2, 4, 9, 13)), {}),
        r"attn_mask: shape must broadcast to \(1, 2, 4\) and .*, got \(1, 1, 2, 4, 9, 13\)",
    ),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_refuses_what_torch_refuses(device, case):
    make, message = BAD_CALLS[case]
    args, kwargs = make(*qkv(device))
    # The definition decides: fused backends of torch let some of these pass.
    with sdpa_kernel(SDPBackend.MATH), pytest.raises(RuntimeError):
        torch_sdpa(*args, **kwargs)
    with silent(), pytest.raises(RuntimeError, match=message):
        scaled_dot_product_attention(*args, **kwargs)


def test_refuses_fewer_values_than_keys(device):
    """Not compared with torch, which may read past the end."""
    query, key, value = qkv(device)
    with pytest.raises(RuntimeError, match=r"value: shape must equal .* \(2, 4, 13, 16\), got"):
        scaled_dot_product_attention(query, key, value[:, :, :12])
    with pytest.raises(RuntimeError, match=r"value: shape must equal .* \(2, 2, 13, 16\), got"):
        scaled_dot_product_attention(query, key[:, :2], value[:, :1], enable_gqa=True)


# Zero heads make torch divide by zero, also where the call would go to torch.
@pytest.mark.filterwarnings("ignore:flashattn_ext")
@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_no_heads(device, dropout_p):
    query, key, value = qkv(device, q=(2, 0, 9, 16), k=(2, 0, 13, 16))
    for enable_gqa in (False, True):
        out = scaled_dot_product_attention(
            query, key, value, dropout_p=dropout_p, enable_gqa=enable_gqa
        )
        assert out.shape == (2, 0, 9, 16)
    some = randn(2, 4, 13, 16, device=device)
    out = scaled_dot_product_attention(query, some, some, dropout_p=dropout_p, enable_gqa=True)
    assert out.shape == (2, 0, 9, 16)
    query = randn(2, 4, 9, 16, device=device)
    with pytest.raises(RuntimeError, match=r"key: heads must divide those of query \(4\), got"):
        scaled_dot_product_attention(query, key, value, dropout_p=dropout_p, enable_gqa=True)
    with pytest.raises(RuntimeError):
        scaled_dot_product_attention(query, key, value, dropout_p=dropout_p)


# --- what goes to torch ------------------------------------------------------------------------


class Tagged(torch.Tensor):
    pass


def jagged(*shapes):
    parts = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    return torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)


def two(*shape):
    return TwoTensor(torch.randn(shape), torch.randn(shape))


# name: (arguments from a device, what the warning says)
TORCH_CALLS = {
    "dropout": (lambda device: (qkv(device), {"dropout_p": 0.5}), "dropout_p other than 0"),
    "large head_dim": (
        lambda device: (qkv(device, q=(1, 2, 9, 264), k=(1, 2, 13, 264)), {}),
        "a head_dim outside 1 to 256",
    ),
    "no head_dim": (
        lambda device: (qkv("cpu", q=(1, 2, 9, 0), k=(1, 2, 13, 0)), {}),
        "a head_dim outside 1 to 256",
    ),
    "other head_dim of value": (
        lambda device: (qkv(device, v=(2, 4, 13, 24)), {"is_causal": True}),
        "a head_dim of value other than that of query",
    ),
    "meta": (lambda device: (qkv("meta"), {}), "meta tensors"),
    "nested": (
        lambda device: ([jagged((8, 4, 16), (6, 4, 16)) for _ in range(3)], {}),
        "nested tensors",
    ),
    "wrapper subclass": (
        lambda device: ([two(2, 4, 9, 16) for _ in range(3)], {}),
        "tensors of type TwoTensor",
    ),
}


def values(tensor):
    """Something that torch.equal takes."""
    if isinstance(tensor, TwoTensor):
        return torch.stack([tensor.a, tensor.b])
    if tensor.is_meta:
        return torch.zeros(tensor.shape)
    return tensor.values() if tensor.is_nested else tensor


@pytest.mark.parametrize("case", TORCH_CALLS)
def test_goes_to_torch(device, case, nothing_said):
    make, reason = TORCH_CALLS[case]
    tensors, options = make(device)
    state = torch.get_rng_state(), torch.cuda.get_rng_state() if device == "cuda" else None
    with warns_once(reason):
        out = scaled_dot_product_attention(*tensors, **options)
        again = scaled_dot_product_attention(*tensors, **options)
    torch.set_rng_state(state[0])
    if device == "cuda":
        torch.cuda.set_rng_state(state[1])
    expected = torch_sdpa(*tensors, **options)
    assert type(out) is type(expected) and out.dtype == expected.dtype
    assert torch.equal(values(out), values(expected))
    if options.get("dropout_p"):
        assert not torch.equal(out, again)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wide_types_on_cuda_go_to_torch(device, dtype, nothing_said):
    query, key, value = qkv(device, dtype)
    if device == "cpu":
        with silent(), OperatorLog() as log:
            scaled_dot_product_attention(query, key, value)
        assert log.ran_ours()
        return
    with warns_once(f"{dtype} on cuda"):
        out = scaled_dot_product_attention(query, key, value)
    assert torch.equal(out, torch_sdpa(query, key, value))


@pytest.mark.parametrize("others", [False, True])
def test_a_mask_that_requires_grad_goes_to_torch(device, others, nothing_said):
    """Alone or with query: result and gradient are torch's. Alone, those of its plain kernel, since
    the backward of the fused ones fails on CUDA."""
    arguments = [*qkv(device), randn(2, 4, 9, 13, device=device).requires_grad_()]
    arguments[0].requires_grad_(others)
    with warns_once("a mask that requires grad"):
        out = scaled_dot_product_attention(*arguments)
    with contextlib.nullcontext() if others else sdpa_kernel(SDPBackend.MATH):
        expected = torch_sdpa(*arguments)
    assert torch.equal(out, expected)
    weight = torch.randn_like(out)
    leaves = [t for t in arguments if t.requires_grad]
    gradients = [torch.autograd.grad(o, leaves, weight, retain_graph=True) for o in (out, expected)]
    assert all(g.abs().max() > 0 for g in gradients[0])
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("which", range(3))
def test_inputs_that_require_grad_run_ours(device, which, nothing_said):
    """Any one of query, key and value; their gradients are in tests/test_backward_contract.py."""
    arguments = [*qkv(device), randn(2, 4, 9, 13, device=device)]
    arguments[which].requires_grad_()
    with silent(), OperatorLog() as log:
        out = scaled_dot_product_attention(*arguments)
    assert log.ran_ours() and out.requires_grad
    assert_close(out.detach(), *(t.detach() for t in arguments))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_grad_mode_parameters_run_ours(device, mode):
    arguments = [torch.nn.Parameter(t) for t in (*qkv(device), randn(9, 13, device=device))]
    with silent(), mode(), OperatorLog() as log:
        out = scaled_dot_product_attention(*arguments)
    assert log.ran_ours() and not out.requires_grad
    assert_close(out, *(a.detach() for a in arguments))


def test_forward_derivatives_go_to_torch(nothing_said):
    query, key, value = qkv("cpu", torch.float64)
    tangent = torch.randn_like(query)
    with sdpa_kernel(SDPBackend.MATH):
        with warns_once("forward-mode derivatives"):
            ours = torch.func.jvp(
                lambda q: scaled_dot_product_attention(q, key, value), (query,), (tangent,)
            )
        theirs = torch.func.jvp(lambda q: torch_sdpa(q, key, value), (query,), (tangent,))
    torch.testing.assert_close(ours, theirs)
    assert ours[1].abs().max() > 0


def test_dtypes_that_torch_refuses_too(nothing_said):
    query, key, value = (t.to(torch.int32) for t in qkv("cpu"))
    for function in (scaled_dot_product_attention, torch_sdpa):
        with pytest.raises(RuntimeError):
            function(query, key, value)
    assert not interface._warned


def test_each_reason_has_its_own_warning(nothing_said):
    query, key, value = qkv("cpu")
    for match, call in {
        "dropout": lambda: scaled_dot_product_attention(query, key, value, dropout_p=0.1),
        "head_dim of value": lambda: scaled_dot_product_attention(query, key, value[..., :8]),
    }.items():
        with warns_once(match):
            call()
        with silent():
            call()


def test_gpu_without_kernels_goes_to_torch(monkeypatch):
    """A CPU-only build and an old GPU, read from fake CUDA tensors: no GPU is needed."""
    with torch._subclasses.FakeTensorMode():
        arguments = [torch.empty(1, 1, 4, 16, device="cuda", dtype=torch.float16)] * 3
    rest = (None, 0.0, "cuda")
    monkeypatch.setattr(interface, "CPU_ONLY_REASON", "no toolkit")
    reason = interface._unsupported_reason(*arguments, *rest)
    assert reason == "cuda tensors in a CPU-only build (no toolkit)"
    monkeypatch.setattr(interface, "CPU_ONLY_REASON", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, expected in (((7, 5), "GPUs below compute capability 8.0"), ((8, 0), None)):
        monkeypatch.setattr(interface, "_device_is_too_old", {})
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        assert interface._unsupported_reason(*arguments, *rest) == expected


def test_put_in_place_of_torchs_function(monkeypatch, nothing_said):
    """Calls that we pass on to torch must not come back to us."""
    query, key, value = qkv("cpu", torch.float64, v=(2, 4, 13, 24))
    expected = torch_sdpa(query, key, value)
    lower_right = torch_sdpa(query, key, value, torch.ones(9, 13, dtype=torch.bool).tril(4))
    monkeypatch.setattr(F, "scaled_dot_product_attention", scaled_dot_product_attention)
    with warns_once("head_dim of value"):
        assert torch.equal(F.scaled_dot_product_attention(query, key, value), expected)
        out = F.scaled_dot_product_attention(query, key, value, causal_lower_right(9, 13))
    torch.testing.assert_close(out, lower_right)


def test_plain_subclass_runs_ours(device):
    query, key, value = qkv(device)
    with silent(), OperatorLog() as log:
        out = scaled_dot_product_attention(query.as_subclass(Tagged), key, value)
    assert log.ran_ours() and type(out) is Tagged
    assert_close(out.as_subclass(torch.Tensor), query, key, value)


# --- autocast ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast(device, dtype):
    query, key, value = qkv(device, torch.float32)
    key = key.half()
    # Values that neither half type holds, so that the cast of the mask shows.
    attn_mask = torch.rand(9, 13, device=device) * 7 + 300.1
    low = [t.to(dtype) for t in (query, key, value, attn_mask)]
    with torch.autocast(device, dtype), silent(), OperatorLog() as log:
        out = scaled_dot_product_attention(query, key, value, attn_mask)
        assert torch_sdpa(query, key, value, attn_mask).dtype == dtype
    assert log.ran_ours() and out.dtype == dtype
    assert torch.equal(out, scaled_dot_product_attention(*low))
    assert not torch.equal(out, scaled_dot_product_attention(*low[:3], attn_mask))


def test_autocast_leaves_bool_masks_and_biases(device):
    query, key, value = qkv(device, torch.float32)
    low = [t.bfloat16() for t in (query, key, value)]
    attn_mask = torch.rand(9, 13, device=device) < 0.7
    for mask in (attn_mask, causal_lower_right(9, 13)):
        with torch.autocast(device, torch.bfloat16):
            out = scaled_dot_product_attention(query, key, value, mask)
        assert torch.equal(out, scaled_dot_product_attention(*low, mask))


def test_autocast_leaves_float64():
    query, key, value = qkv("cpu", torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        out = scaled_dot_product_attention(query, key, value)
        assert torch_sdpa(query, key, value).dtype == torch.float64
        for function in (scaled_dot_product_attention, torch_sdpa):
            with pytest.raises(RuntimeError, match="dtype"):
                function(query, key.float(), value.float())
    assert torch.equal(out, scaled_dot_product_attention(query, key, value))


def test_autocast_of_a_call_for_torch(device, nothing_said):
    query, key, value = qkv(device, torch.float32)
    attn_mask = randn(9, 13, device=device, dtype=torch.float32)
    leaves = [t.requires_grad_() for t in (query, attn_mask)]
    with torch.autocast(device, torch.bfloat16), warns_once("a mask that requires grad"):
        out = scaled_dot_product_attention(query, key, value, attn_mask)
        expected = torch_sdpa(query, key, value, attn_mask)
    assert torch.equal(out, expected) and out.dtype == torch.bfloat16
    for gradient in torch.autograd.grad(out.sum(), leaves):
        assert gradient.dtype == torch.float32 and gradient.abs().max() > 0


def test_autocast_of_another_device_changes_nothing():
    query, key, value = qkv("cpu", torch.float32)
    with torch.autocast("cuda", torch.bfloat16, enabled=torch.cuda.is_available()):
        assert scaled_dot_product_attention(query, key, value).dtype == torch.float32


# --- the package -------------------------------------------------------------------------------


def test_exports():
    assert {"scaled_dot_product_attention", "flash_attn_func"} <= set(flashattn_ext.__all__)
    for function in (scaled_dot_product_attention, flash_attn_func):
        for word in ("Args:", "Returns:", "Raises:", *inspect.signature(function).parameters):
            assert word in function.__doc__, f"{function.__name__}: {word} is not documented"


def test_mask_that_is_no_tensor():
    """The error is torch's, whatever it is in this version."""
    with pytest.raises(TypeError):
        torch_sdpa(*qkv("cpu"), attn_mask=[1])
    with pytest.raises(TypeError):
        scaled_dot_product_attention(*qkv("cpu"), attn_mask=[1])


def test_a_tensor_is_no_scale(device):
    x = torch.randn(1, 2, 4, 8, dtype=torch.half, device=device)
    scale = torch.tensor(0.3, requires_grad=True)
    with pytest.raises(TypeError, match="scale: must be a float, got a tensor"):
        flashattn_ext.scaled_dot_product_attention(x, x, x, scale=scale)
    for function in (flashattn_ext.flash_attn_func, flashattn_ext.flash_attn_with_kvcache):
        with pytest.raises(TypeError, match="softmax_scale: must be a float, got a tensor"):
            function(x, x, x, softmax_scale=scale)
