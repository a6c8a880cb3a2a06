"""fa::forward as the dispatcher, torch.compile and torch.export see it: what holds of the operator
whatever it computes. For CUDA streams, graphs and devices see test_op_streams.py.
"""

import concurrent.futures
import warnings

import pytest
import torch
from reference import check, close
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.bias import causal_lower_right
from torch.utils._python_dispatch import TorchDispatchMode

from flashattn_ext import flash_attn_func, interface, scaled_dot_product_attention

forward = torch.ops.fa.forward.default


def randn(*shape, device="cpu", dtype=torch.float16):
    return torch.randn(shape, device=device, dtype=dtype)


def qkv(device, dtype=torch.float16, *, q=(2, 4, 9, 16), k=(2, 2, 13, 16)):
    return [randn(*shape, device=device, dtype=dtype) for shape in (q, k, k)]


def transposed(device, dtype=torch.float16, *, q=(2, 9, 4, 16), k=(2, 13, 2, 16)):
    """(batch, seqlen, heads, head_dim) memory seen as (batch, heads, seqlen, head_dim)."""
    return [t.transpose(1, 2) for t in qkv(device, dtype, q=q, k=k)]


def assert_same(ours, expected):
    """Bit by bit on a GPU; to rounding on a CPU, whose matrix products depend on the layout."""
    if ours.is_cuda:
        assert torch.equal(ours, expected)
    else:
        close(ours, expected, ours.dtype)


@pytest.fixture
def fresh_dynamo(monkeypatch):
    """No compiled code, and no warning given, before or after."""
    monkeypatch.setattr(interface, "_warned", set())
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


needs_compile = pytest.mark.usefixtures("fresh_dynamo")


def compiled(function, *, dynamic=None, backend="aot_eager"):
    return torch.compile(function, fullgraph=True, dynamic=dynamic, backend=backend)


# --- opcheck and the fake kernel ---------------------------------------------------------------

OPCHECK = {
    "plain": lambda d: (qkv(d), {}),
    "causal, scale": lambda d: ([*qkv(d), None, True, -0.5], {}),
    "transposed, bool mask": lambda d: ([*transposed(d), torch.rand(9, 13, device=d) < 0.7], {}),
    "float32 mask, bfloat16": lambda d: (
        [*qkv(d, torch.bfloat16), randn(2, 1, 1, 13, device=d, dtype=torch.float32)],
        {},
    ),
    "window": lambda d: (
        qkv(d, q=(1, 2, 9, 72), k=(1, 2, 13, 72)),
        {"window_left": 3, "window_right": 2, "bottom_right": True},
    ),
    "expanded": lambda d: (
        [randn(1, 1, 9, 16, device=d).expand(2, 4, 9, 16), *qkv(d)[1:]],
        {"bottom_right": True},
    ),
    "no query": lambda d: (qkv(d, q=(2, 4, 0, 16)), {}),
    "no key": lambda d: (qkv(d, k=(2, 2, 0, 16)), {}),
}


@needs_compile
@pytest.mark.parametrize("case", OPCHECK)
def test_opcheck(device, case):
    """Schema, autograd registration, fake kernel, and tracing with dynamic shapes."""
    args, kwargs = OPCHECK[case](device)
    results = torch.library.opcheck(forward, tuple(args), kwargs)
    assert set(results.values()) == {"SUCCESS"} and len(results) == 4


def test_schema():
    assert str(forward._schema) == (
        "fa::forward(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, "
        "bool is_causal=False, float? scale=None, *, SymInt window_left=-1, "
        "SymInt window_right=-1, bool bottom_right=False, bool deterministic=False) -> "
        "(Tensor out, Tensor lse)"
    )
    # Inductor must not lay the inputs out anew: out follows the strides of query.
    assert {torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides} <= set(forward.tags)


# Querys of one shape, (2, 4, 6, 16), in many layouts.
LAYOUTS = {
    "contiguous": lambda new: new(2, 4, 6, 16),
    "batch, seqlen, heads": lambda new: new(2, 6, 4, 16).transpose(1, 2),
    "seqlen, batch, heads": lambda new: new(6, 2, 4, 16).permute(1, 2, 0, 3),
    "heads, batch": lambda new: new(4, 2, 6, 16).transpose(0, 1),
    "packed": lambda new: new(2, 6, 3, 4, 16)[:, :, 1].transpose(1, 2),
    "rows of a longer cache": lambda new: new(2, 4, 50, 16)[:, :, 3:9],
    "every second row": lambda new: new(2, 4, 12, 16)[:, :, ::2],
    "one head for all": lambda new: new(2, 1, 6, 16).expand(2, 4, 6, 16),
    "one batch for all": lambda new: new(1, 4, 6, 16).expand(2, 4, 6, 16),
    "one row for all": lambda new: new(2, 4, 1, 16).expand(2, 4, 6, 16),
    "one number for all": lambda new: new(1, 1, 1, 1).expand(2, 4, 6, 16),
    "last dimension outside": lambda new: new(2, 4, 16, 6).transpose(2, 3),
    "columns of a wider tensor": lambda new: new(2, 4, 6, 40)[..., 5:21],
    "every second column": lambda new: new(2, 4, 6, 32)[..., ::2],
    "odd offset": lambda new: new(1 + 2 * 4 * 6 * 16)[1:].view(2, 4, 6, 16),
    "odd row stride": lambda new: new(2, 4, 6, 17)[..., 1:],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides(device, layout):
    """out is laid out as empty_like(query), the fake kernel agrees, and no value depends on it."""
    query = LAYOUTS[layout](lambda *shape: randn(*shape, device=device))
    key, value = (LAYOUTS[layout](lambda *shape: randn(*shape, device=device)) for _ in range(2))
    assert query.shape == (2, 4, 6, 16)
    key, value = key[:, :2], value[:, 2:]
    attn_mask = randn(6, 6, device=device).t()
    out, lse = forward(query, key, value, attn_mask)
    assert out.stride() == torch.empty_like(query).stride()
    assert lse.shape == (2, 4, 6) and lse.is_contiguous() and lse.dtype == torch.float32
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in (query, key, value)]
        fake_out, fake_lse = forward(*fakes)
    for fake, real in ((fake_out, out), (fake_lse, lse)):
        assert (fake.shape, fake.stride(), fake.dtype, fake.device) == (
            real.shape,
            real.stride(),
            real.dtype,
            real.device,
        )
    same = forward(*(t.contiguous() for t in (query, key, value, attn_mask)))
    assert_same(out, same[0])
    assert_same(lse, same[1])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_mask_strides(device, layout):
    """A mask in any layout, with padding columns behind it or none."""
    query, key, value = qkv(device, q=(2, 4, 6, 24), k=(2, 2, 16, 24))
    attn_mask = LAYOUTS[layout](lambda *shape: randn(*shape, device=device))
    for mask in (attn_mask, attn_mask > 0, attn_mask.float()):
        out, lse = forward(query, key, value, mask)
        same, same_lse = forward(query, key, value, mask.contiguous())
        # The mask is no operand of a matrix product: the same on a CPU too.
        assert torch.equal(out, same) and torch.equal(lse, same_lse)


def test_stride_of_a_dimension_of_size_one(device):
    """It means nothing, whatever it is: also that of the last dimension."""
    query = randn(1, 1, 2, 2, device=device)[..., :1]
    key = randn(64, device=device).as_strided((1, 1, 3, 1), (7, 5, 2, 9))
    out, _ = check(query, key, key)
    assert_same(out, forward(query.contiguous(), key.contiguous(), key.contiguous())[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_fake_cuda_tensors(dtype):
    """Needs no GPU: shapes, dtypes, strides and device of what a CUDA call would return."""
    with FakeTensorMode():
        query = torch.empty(2, 9, 4, 72, device="cuda", dtype=dtype).transpose(1, 2)
        key = torch.empty(2, 2, 13, 72, device="cuda", dtype=dtype)
        mask = torch.empty(9, 13, device="cuda", dtype=torch.bool)
        out, lse = forward(query, key, key, mask, True, bottom_right=True)
        assert (out.shape, out.stride(), out.dtype) == (query.shape, query.stride(), dtype)
        assert (lse.shape, lse.stride(), lse.dtype) == ((2, 4, 9), (36, 9, 1), torch.float32)
        assert out.device.type == lse.device.type == "cuda"


def test_meta_tensors():
    query, key, value = qkv("meta", torch.float64)
    out, lse = forward(query, key, value)
    assert out.shape == query.shape and lse.dtype == torch.float64 and lse.is_meta
    real = torch.zeros_like(value, device="cpu")
    for name, arguments in (
        ("key", (query, real, value)),
        ("value", (query, key, real)),
        ("attn_mask", (query, key, value, torch.zeros(9, 13))),
    ):
        with pytest.raises(RuntimeError, match=rf"{name}: device must equal .* got cpu"):
            forward(*arguments)


# --- errors ------------------------------------------------------------------------------------

BAD_CALLS = {
    "3-D query": (
        lambda q, k, v: ((q[0], k, v), {}),
        r"query: must have 4 dimensions \(batch, heads, seqlen, head_dim\), got 3: \(4, 9, 16\)",
    ),
    "5-D key": (
        lambda q, k, v: ((q, k[None], v), {}),
        r"key: must have 4 dimensions .* got 5: \(1, 2, 2, 13, 16\)",
    ),
    "3-D value": (
        lambda q, k, v: ((q, k, v[0]), {}),
        r"value: must have 4 dimensions .* got 3: \(2, 13, 16\)",
    ),
    "integers": (
        lambda q, k, v: ((q.int(), k.int(), v.int()), {}),
        r"query: dtype must be .*, got Int",
    ),
    "dtype of key": (
        lambda q, k, v: ((q, k.bfloat16(), v), {}),
        r"key: dtype must equal that of query \(Half\), got BFloat16",
    ),
    "dtype of value": (
        lambda q, k, v: ((q, k, v.float()), {}),
        r"value: dtype must equal that of query \(Half\), got Float",
    ),
    "head_dim 0": (
        lambda q, k, v: ((q[..., :0], k[..., :0], v[..., :0]), {}),
        r"query: head_dim must be at least 1, got 0",
    ),
    "head_dim 257": (
        lambda q, k, v: ([t[..., :1].expand(-1, -1, -1, 257) for t in (q, k, v)], {}),
        r"query: head_dim must be at most 256, got 257",
    ),
    "batch": (
        lambda q, k, v: ((q, k[:1], v[:1]), {}),
        r"key: batch must equal that of query \(2\), got 1; the layout is \(batch, heads, seqlen, "
        r"head_dim\), query is \(2, 4, 9, 16\), key is \(1, 2, 13, 16\)",
    ),
    "head_dim of key": (
        lambda q, k, v: ((q[..., :8], k, v), {}),
        r"key: head_dim must equal that of query \(8\), got 16",
    ),
    "head_dim of value": (
        lambda q, k, v: ((q, k, v[..., :8]), {}),
        r"value: shape must equal that of key \(2, 2, 13, 16\), got \(2, 2, 13, 8\)",
    ),
    "length of value": (
        lambda q, k, v: ((q, k, v[:, :, :12]), {}),
        r"value: shape must equal that of key \(2, 2, 13, 16\), got \(2, 2, 12, 16\)",
    ),
    "heads 3 and 2": (
        lambda q, k, v: ((q[:, :3], k, v), {}),
        r"key: heads must divide those of query \(3\), got 2; the layout is",
    ),
    "no heads of key": (
        lambda q, k, v: ((q, k[:, :0], v[:, :0]), {}),
        r"key: heads must divide those of query \(4\), got 0",
    ),
    "dtype of mask": (
        lambda q, k, v: ((q, k, v, q.new_zeros(9, 13).bfloat16()), {}),
        r"attn_mask: dtype must be bool, float32 or that of query \(Half\), got BFloat16",
    ),
    "5-D mask": (
        lambda q, k, v: ((q, k, v, q.new_zeros(1, 1, 1, 9, 13)), {}),
        r"attn_mask: shape must broadcast to \(batch, heads, seqlen_q, seqlen_k\) = "
        r"\(2, 4, 9, 13\), got \(1, 1, 1, 9, 13\)",
    ),
    "shape of mask": (
        lambda q, k, v: ((q, k, v, q.new_zeros(2, 9, 13)), {}),
        r"attn_mask: shape must broadcast to .* got \(2, 9, 13\)",
    ),
    "window_left": (
        lambda q, k, v: ((q, k, v), {"window_left": -3}),
        r"window_left: must be -1 \(unlimited\) or at least 0, got -3",
    ),
    "window_right": (
        lambda q, k, v: ((q, k, v), {"window_right": -2}),
        r"window_right: must be -1 \(unlimited\) or at least 0, got -2",
    ),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_errors_name_argument_rule_and_value(device, case):
    make, message = BAD_CALLS[case]
    args, kwargs = make(*qkv(device))
    with pytest.raises(RuntimeError, match=message):
        forward(*args, **kwargs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wide_types_on_cuda_are_refused_by_the_op(device, dtype):
    arguments = qkv(device, dtype)
    if device == "cpu":
        check(*arguments)
        return
    with pytest.raises(RuntimeError, match=r"query: dtype must be .*, got (Float|Double)"):
        forward(*arguments)


def test_a_new_thread(device):
    """It has no CUDA context bound to it, and the first thing it does is a call."""
    tensors = qkv(device)
    expected = forward(*tensors)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        results = pool.submit(forward, *tensors).result()
    for ours, other in zip(results, expected, strict=True):
        assert torch.equal(ours, other)


def test_operands_on_another_device(device):
    if device == "cpu":
        pytest.skip("needs two device types")
    query, key, value = qkv(device)
    mask = torch.zeros(9, 13, dtype=torch.bool)
    for name, arguments in (
        ("key", (query, key.cpu(), value)),
        ("value", (query, key, value.cpu())),
        ("attn_mask", (query, key, value, mask)),
    ):
        match = rf"{name}: device must equal that of query \(cuda:0\), got cpu"
        with pytest.raises(RuntimeError, match=match):
            forward(*arguments)
    with pytest.raises(RuntimeError, match=r"query: device must be that of .*, got cpu"):
        forward(query.cpu(), key.cpu(), value.cpu(), mask.to(device))


# --- autograd, modes, vmap ---------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_grad_mode(device, mode):
    query, key, value = qkv(device)
    expected = forward(query, key, value)
    with mode():
        out, lse = forward(query.requires_grad_(), key, value)
    assert not out.requires_grad
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


class CallCount(TorchDispatchMode):
    """How often the kernel is called."""

    def __enter__(self):
        self.count = 0
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is forward
        return func(*args, **(kwargs or {}))


MAPPED = {
    "all": ((3, 2, 4, 9, 16), (3, 2, 2, 13, 16), None, (0, 0, 0, None)),
    "query": ((3, 2, 4, 9, 16), (2, 2, 13, 16), None, (0, None, None, None)),
    "key and value, last": ((2, 4, 9, 16), (2, 2, 13, 16, 3), None, (None, -1, -1, None)),
    "mask": ((2, 4, 9, 16), (2, 2, 13, 16), (2, 4, 9, 3, 13), (None, None, None, 3)),
    "row of a mask": ((2, 4, 9, 16), (2, 2, 13, 16), (13, 3), (None, None, None, 1)),
    "query, common mask": ((3, 2, 4, 9, 16), (2, 2, 13, 16), (2, 1, 9, 13), (0, None, None, None)),
    "query, common rows": ((3, 2, 4, 9, 16), (2, 2, 13, 16), (9, 13), (0, None, None, None)),
}


@pytest.mark.parametrize("case", MAPPED)
def test_vmap(device, case):
    """One call with the mapped dimension in batch, equal to a loop."""
    q_shape, k_shape, mask_shape, in_dims = MAPPED[case]
    arguments = qkv(device, q=q_shape, k=k_shape)
    arguments.append(None if mask_shape is None else torch.rand(mask_shape, device=device) < 0.7)

    def attend(*args):
        return forward(*args, True, 0.3, window_left=4, bottom_right=True)

    with CallCount() as calls:
        out, lse = torch.vmap(attend, in_dims=in_dims)(*arguments)
    assert calls.count == 1
    for i in range(3):
        single = [
            a if dim is None else a.select(dim, i)
            for a, dim in zip(arguments, in_dims, strict=True)
        ]
        expected, expected_lse = attend(*single)
        assert_same(out[i], expected)
        assert_same(lse[i], expected_lse)


def test_vmap_of_the_public_functions(device):
    query, key, value = qkv(device, q=(3, 2, 4, 9, 16), k=(3, 2, 4, 13, 16))
    out = torch.vmap(scaled_dot_product_attention)(query, key, value)
    flat = [t.flatten(0, 1) for t in (query, key, value)]
    assert_same(out.flatten(0, 1), scaled_dot_product_attention(*flat))
    out = torch.vmap(flash_attn_func)(*(t.transpose(2, 3) for t in (query, key, value)))
    assert_same(out.flatten(0, 1), flash_attn_func(*(t.transpose(1, 2) for t in flat)))


# --- torch.compile and torch.export ------------------------------------------------------------


def sdpa_with_options(query, key, value, attn_mask):
    masked = scaled_dot_product_attention(query, key, value, attn_mask, enable_gqa=True)
    causal = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return masked, causal


def flash_with_options(q, k, v):
    out, lse, _ = flash_attn_func(q, k, v, causal=True, window_size=(5, -1), return_attn_probs=True)
    return out, lse, flash_attn_func(q, k, v, softmax_scale=0.3)


def lengths(device, seqlen_q, seqlen_k, batch=3):
    """Transposed views, as models make them, and a mask for them. No two sizes are equal, as
    torch.compile takes equal ones for the same symbol."""
    tensors = transposed(device, q=(batch, seqlen_q, 4, 16), k=(batch, seqlen_k, 2, 16))
    return tensors, torch.rand(batch, 1, seqlen_q, seqlen_k, device=device) < 0.7


@needs_compile
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiled_sdpa(device, dynamic):
    counter = CompileCounterWithBackend("aot_eager")
    function = compiled(sdpa_with_options, dynamic=dynamic, backend=counter)
    compilations = []
    for seqlen_q, seqlen_k, batch in ((9, 13, 3), (30, 17, 5), (5, 40, 7)):
        tensors, attn_mask = lengths(device, seqlen_q, seqlen_k, batch)
        ours = function(*tensors, attn_mask)
        for out, expected in zip(ours, sdpa_with_options(*tensors, attn_mask), strict=True):
            assert torch.equal(out, expected) and out.stride() == expected.stride()
        compilations.append(counter.frame_count)
    # The first call may take torch more than one attempt; after it, one graph does for all sizes.
    assert not dynamic or len(set(compilations)) == 1


@needs_compile
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiled_flash(device, dynamic):
    function = compiled(flash_with_options, dynamic=dynamic)
    for seqlen_q, seqlen_k in ((9, 13), (30, 17)):
        tensors = [t.transpose(1, 2) for t in lengths(device, seqlen_q, seqlen_k)[0]]
        ours = function(*tensors)
        for out, expected in zip(ours, flash_with_options(*tensors), strict=True):
            assert torch.equal(out, expected) and out.stride() == expected.stride()


@needs_compile
def test_default_scale_with_dynamic_shapes(device):
    """The scale comes from head_dim at run time, also when that is a symbol."""
    function = compiled(scaled_dot_product_attention, dynamic=True)
    for head_dim in (32, 48, 64):
        query, key, value = qkv(device, q=(2, 3, 11, head_dim), k=(2, 3, 11, head_dim))
        out = function(query, key, value)
        assert torch.equal(out, scaled_dot_product_attention(query, key, value))
        assert out.isfinite().all()


@needs_compile
def test_scale_and_causality_that_change(device):
    """Arguments that are not tensors: a float, and a condition on a symbol."""

    def attend(query, key, value, scale):
        causal = query.size(2) > 1
        return scaled_dot_product_attention(query, key, value, None, 0.0, causal, scale, True)

    function = compiled(attend, dynamic=True)
    for scale, seqlen_q in ((0.3, 9), (0.7, 9), (-0.2, 5), (0.5, 1)):
        tensors, _ = lengths(device, seqlen_q, 13)
        assert torch.equal(function(*tensors, scale), attend(*tensors, scale))


@needs_compile
def test_masks_expanded_and_strided_under_compile(device):
    """The same masks as in eager mode, in turn through one compiled function."""
    function = compiled(sdpa_with_options, dynamic=True)
    tensors, attn_mask = lengths(device, 9, 13)
    for mask in (
        attn_mask,
        attn_mask.expand(3, 4, 9, 13),
        torch.rand(3, 1, 13, 9, device=device).transpose(2, 3) < 0.7,
        randn(1, 4, 9, 20, device=device)[..., 3:16],
    ):
        ours = function(*tensors, mask)
        for out, expected in zip(ours, sdpa_with_options(*tensors, mask), strict=True):
            assert torch.equal(out, expected)


@needs_compile
def test_inductor_keeps_strides(device):
    """An attention layer through Inductor, which asserts the strides that the fake kernel gives:
    Q and V transposed, an additive mask that is a slice and of odd width."""

    def layer(x, weight, attn_mask):
        q, k, v = (x @ weight).unflatten(-1, (3, 4, 16)).unbind(2)
        query, key, value = (t.transpose(1, 2) for t in (q, k, v))
        if device == "cuda":
            # Code that Inductor writes itself, and could lay out as it likes. On the CPU it would
            # take a C++ compiler half a minute.
            query, key = query * 2, key.contiguous()
        return scaled_dot_product_attention(query, key, value, attn_mask)

    function = compiled(layer, dynamic=True, backend="inductor")
    weight = randn(64, 3 * 64, device=device, dtype=torch.bfloat16) / 8
    for seqlen in (9, 14):
        x = randn(2, seqlen, 64, device=device, dtype=torch.bfloat16)
        attn_mask = randn(2, 1, seqlen, seqlen + 3, device=device, dtype=torch.bfloat16)[..., :-3]
        with torch.no_grad():
            out, expected = function(x, weight, attn_mask), layer(x, weight, attn_mask)
        assert out.stride() == expected.stride() == (seqlen * 64, 16, 64, 1)
        torch.testing.assert_close(out, expected)


@needs_compile
def test_compiled_call_for_torch(device):
    """No graph break where the call is torch's; the warning comes while tracing, once."""

    def attend(query, key, value, attn_mask):
        return scaled_dot_product_attention(query, key, value, attn_mask, enable_gqa=True)

    query, key, value = qkv(device)
    attn_mask = randn(9, 13, device=device).requires_grad_()
    function = compiled(attend, dynamic=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out = function(query, key, value, attn_mask)
        function(query[:, :, :5], key, value, attn_mask[:5])
    said = [str(w.message) for w in caught if "flashattn_ext" in str(w.message)]
    assert len(said) == 1 and "mask that requires grad" in said[0], said
    expected = attend(query, key, value, attn_mask)
    torch.testing.assert_close(out, expected)
    gradients = [torch.autograd.grad(o.float().sum(), attn_mask)[0] for o in (out, expected)]
    assert gradients[0].abs().max() > 0
    torch.testing.assert_close(*gradients)


@needs_compile
def test_compiled_flash_for_torch(device):
    def attend(q, k, v):
        return flash_attn_func(q, k, v, causal=True, return_attn_probs=True)[:2]

    function = compiled(attend, dynamic=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensors = qkv(device, q=(3, 9, 4, 264), k=(3, 13, 2, 264))
        torch.testing.assert_close(function(*tensors), attend(*tensors))


@needs_compile
def test_compiled_under_autocast(device):
    def attend(query, key, value, attn_mask):
        with torch.autocast(device, torch.bfloat16):
            return scaled_dot_product_attention(query, key, value, attn_mask, enable_gqa=True)

    arguments = [*qkv(device, torch.float32), randn(9, 13, device=device, dtype=torch.float32)]
    out = compiled(attend, dynamic=True)(*arguments)
    assert out.dtype == torch.bfloat16 and torch.equal(out, attend(*arguments))


@needs_compile
def test_compiled_causal_bias(device):
    query, key, value = qkv(device, k=(2, 4, 13, 16))
    bias = causal_lower_right(9, 13)

    def attend(query, key, value):
        return scaled_dot_product_attention(query, key, value, bias)

    assert torch.equal(compiled(attend)(query, key, value), attend(query, key, value))


@needs_compile
def test_compiled_ranks(device):
    function = compiled(scaled_dot_product_attention, dynamic=True)
    for shape in ((4, 9, 16), (3, 2, 4, 9, 16)):
        query, key, value = qkv(device, q=shape, k=shape)
        attn_mask = torch.rand(9, 9, device=device) < 0.7
        out = function(query, key, value, attn_mask)
        assert torch.equal(out, scaled_dot_product_attention(query, key, value, attn_mask))


class Sdpa(torch.nn.Module):
    def forward(self, query, key, value, attn_mask):
        return sdpa_with_options(query, key, value, attn_mask)


class Flash(torch.nn.Module):
    def forward(self, q, k, v):
        return flash_with_options(q, k, v)


def count_ours(program):
    return sum(node.target is forward for node in program.graph.nodes)


@needs_compile
@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
def test_export(device, strict):
    """The exported program holds our operator, and runs with other lengths."""
    batch, seqlen_q, seqlen_k = (torch.export.Dim(n) for n in ("batch", "seqlen_q", "seqlen_k"))
    tensors, attn_mask = lengths(device, 9, 13)
    other, other_mask = lengths(device, 30, 17, batch=5)
    rows = {0: batch, 2: seqlen_q}
    columns = {0: batch, 2: seqlen_k}
    program = torch.export.export(
        Sdpa(),
        (*tensors, attn_mask),
        dynamic_shapes=(rows, columns, columns, {0: batch, 2: seqlen_q, 3: seqlen_k}),
        strict=strict,
    ).run_decompositions()
    assert count_ours(program) == 2
    ours = program.module()(*other, other_mask)
    for out, expected in zip(ours, sdpa_with_options(*other, other_mask), strict=True):
        assert torch.equal(out, expected)

    tensors, other = ([t.transpose(1, 2) for t in ts] for ts in (tensors, other))
    rows, columns = {0: batch, 1: seqlen_q}, {0: batch, 1: seqlen_k}
    program = torch.export.export(
        Flash(), tuple(tensors), dynamic_shapes=(rows, columns, columns), strict=strict
    ).run_decompositions()
    assert count_ours(program) == 2
    for out, expected in zip(program.module()(*other), flash_with_options(*other), strict=True):
        assert torch.equal(out, expected)
