"""The derivative of fa::forward as autograd, the dispatcher, torch.compile and CUDA streams see it:
what is kept, what is refused, and which modes and transforms it goes through."""

import contextlib
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from calls import qkv, randn, silent, torch_sdpa, warns_once
from reference import check_gradients, close
from test_op_contract import LAYOUTS
from torch._dynamo import compiled_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from flashattn_ext import flash_attn_func, interface, scaled_dot_product_attention

forward = torch.ops.fa.forward.default
backward = torch.ops.fa.backward.default


@pytest.fixture
def fresh_dynamo(monkeypatch):
    """No compiled code, and no warning given, before or after."""
    monkeypatch.setattr(interface, "_warned", set())
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


needs_compile = pytest.mark.usefixtures("fresh_dynamo")


def inputs(device, dtype=torch.float16, *, q=(2, 4, 9, 16), k=(2, 2, 13, 16)):
    return [t.requires_grad_() for t in qkv(device, dtype, q=q, k=k)]


def plain(tensors):
    return [t.detach().clone().requires_grad_() for t in tensors]


def saved_of(*tensors, **options):
    """A call of the op with its result and what fa::backward takes."""
    out, lse = forward(*tensors, **options)
    return torch.randn_like(out), *tensors[:3], out, lse, *tensors[3:]


class Calls(TorchDispatchMode):
    """The calls of fa::backward that reach a kernel, by their keyword arguments."""

    def __enter__(self):
        self.calls = []
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is backward:
            self.calls.append(kwargs)
        return func(*args, **(kwargs or {}))


# --- opcheck, schema, fake kernel ---------------------------------------------------------------

OPCHECK = {
    "plain": lambda d: (qkv(d, k=(2, 2, 13, 16)), {}),
    "window": lambda d: (qkv(d, k=(2, 2, 13, 16)), {"window_left": 3, "bottom_right": True}),
    "bool mask": lambda d: ([*qkv(d, torch.bfloat16), torch.rand(9, 13, device=d) < 0.7], {}),
    "transposed": lambda d: (
        [t.transpose(1, 2) for t in qkv(d, q=(2, 9, 4, 16), k=(2, 13, 2, 16))],
        {"is_causal": True},
    ),
    "expanded": lambda d: ([randn(1, 1, 9, 16, device=d).expand(2, 4, 9, 16), *qkv(d)[1:]], {}),
    "no query": lambda d: (qkv(d, q=(2, 4, 0, 16)), {}),
    "no key": lambda d: (qkv(d, k=(2, 2, 0, 16)), {}),
}


@needs_compile
@pytest.mark.parametrize("case", OPCHECK)
def test_opcheck(device, case):
    """Both ops: schema, autograd registration, fake kernel, and tracing of forward and backward."""
    args, kwargs = OPCHECK[case](device)
    results = torch.library.opcheck(
        backward, saved_of(*args, **kwargs), kwargs | {"deterministic": True}
    )
    assert set(results.values()) == {"SUCCESS"} and len(results) == 4
    args = [t.requires_grad_() if t.is_floating_point() else t for t in args]
    results = torch.library.opcheck(forward, tuple(args), kwargs)
    assert set(results.values()) == {"SUCCESS"} and len(results) == 4


def test_schema():
    assert str(backward._schema) == (
        "fa::backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, "
        "Tensor lse, Tensor? attn_mask=None, bool is_causal=False, float? scale=None, *, "
        "SymInt window_left=-1, SymInt window_right=-1, bool bottom_right=False, "
        "bool deterministic=False) -> (Tensor grad_query, Tensor grad_key, Tensor grad_value)"
    )
    # Inductor must not lay the inputs out anew: the gradients follow their strides.
    assert {torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides} <= set(backward.tags)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides(device, layout):
    """Each gradient is laid out as empty_like of its tensor, and the fake kernel agrees. The three
    layouts differ: here key has the one, and in the end value."""
    make = LAYOUTS[layout]
    for which in range(3):
        tensors = qkv(device, q=(2, 4, 6, 16), k=(2, 4, 6, 16))
        tensors[which] = make(lambda *shape: randn(*shape, device=device))
        arguments = saved_of(*tensors)
        gradients = backward(*arguments)
        with FakeTensorMode() as mode:
            fakes = backward(*(mode.from_tensor(t) for t in arguments))
        for ours, fake, tensor in zip(gradients, fakes, tensors, strict=True):
            like = torch.empty_like(tensor)
            for result in (ours, fake):
                assert (result.shape, result.stride()) == (like.shape, like.stride())
                assert (result.dtype, result.device) == (like.dtype, like.device)


def test_meta_tensors():
    query, key, value = qkv("meta", torch.float64)
    arguments = saved_of(query, key, value)
    assert [g.shape for g in backward(*arguments)] == [t.shape for t in (query, key, value)]
    for i, name in enumerate(("grad_out", None, "key", "value", "out", "lse")):
        if name is not None:
            mixed = list(arguments)
            mixed[i] = torch.zeros(mixed[i].shape, dtype=mixed[i].dtype)
            with pytest.raises(RuntimeError, match=rf"{name}: device must equal .* got cpu"):
                backward(*mixed)


def test_kernel_is_named(device):
    for tensors in (qkv(device), qkv(device, q=(2, 4, 0, 16))):
        text = torch.ops.fa.backward_kernel(*saved_of(*tensors))
        if device == "cpu":
            assert text == "cpu: query is on the CPU"
        else:
            assert text.startswith(("bwd_sm", "none: no query")), text


# --- errors -------------------------------------------------------------------------------------

BAD_CALLS = {
    "shape of grad_out": (
        lambda g, q, k, v, out, lse: (g[:, :, :5], q, k, v, out, lse),
        r"grad_out: shape must be \(2, 4, 9, 16\), got \(2, 4, 5, 16\)",
    ),
    "rank of grad_out": (
        lambda g, q, k, v, out, lse: (g[0], q, k, v, out, lse),
        r"grad_out: shape must be \(2, 4, 9, 16\), got \(4, 9, 16\)",
    ),
    "dtype of grad_out": (
        lambda g, q, k, v, out, lse: (g.float(), q, k, v, out, lse),
        r"grad_out: dtype must equal that of query \(Half\), got Float",
    ),
    "shape of out": (
        lambda g, q, k, v, out, lse: (g, q, k, v, out[:1], lse),
        r"out: shape must be \(2, 4, 9, 16\), got \(1, 4, 9, 16\)",
    ),
    "dtype of out": (
        lambda g, q, k, v, out, lse: (g, q, k, v, out.bfloat16(), lse),
        r"out: dtype must equal that of query \(Half\), got BFloat16",
    ),
    "shape of lse": (
        lambda g, q, k, v, out, lse: (g, q, k, v, out, lse[..., None]),
        r"lse: shape must be \(2, 4, 9\), got \(2, 4, 9, 1\)",
    ),
    "dtype of lse": (
        lambda g, q, k, v, out, lse: (g, q, k, v, out, lse.half()),
        r"lse: dtype must be Float beside query in Half, got Half",
    ),
    "what forward refuses": (
        lambda g, q, k, v, out, lse: (g, q, k[:, :, :, :8], v, out, lse),
        r"key: head_dim must equal that of query \(16\), got 8",
    ),
    "mask": (
        lambda g, q, k, v, out, lse: (g, q, k, v, out, lse, q.new_zeros(9, 12)),
        r"attn_mask: shape must broadcast to .* got \(9, 12\)",
    ),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_errors_name_argument_rule_and_value(device, case):
    make, message = BAD_CALLS[case]
    arguments = make(*saved_of(*qkv(device)))
    for op in (backward, torch.ops.fa.backward_kernel):
        with pytest.raises(RuntimeError, match=message):
            op(*arguments)


def test_window_is_checked(device):
    with pytest.raises(RuntimeError, match="window_left: must be -1"):
        backward(*saved_of(*qkv(device)), window_left=-2)


def test_no_derivative_with_respect_to_the_mask(device):
    """The op says so at once; the public function leaves the call to torch."""
    tensors = [*inputs(device), randn(9, 13, device=device).requires_grad_()]
    with pytest.raises(
        RuntimeError, match=r"attn_mask: must not require grad.* got requires_grad=True"
    ):
        forward(*tensors)
    with torch.no_grad():
        forward(*tensors)


def test_no_derivative_of_a_derivative(device):
    """Gradients with create_graph are right, and raise when they are differentiated."""
    tensors = inputs(device, k=(2, 4, 13, 16))
    out = scaled_dot_product_attention(*tensors)
    gradients = torch.autograd.grad(out.sum(), tensors, create_graph=True)
    expected = torch.autograd.grad(scaled_dot_product_attention(*tensors).sum(), tensors)
    for ours, other in zip(gradients, expected, strict=True):
        close(ours, other, torch.float16)
        with pytest.raises(RuntimeError, match=r"fa::backward: .* no derivative .*SDPBackend.MATH"):
            ours.sum().backward(retain_graph=True)


def test_no_forward_mode_derivative(device):
    tensors = [*qkv(device), randn(9, 13, device=device)]
    names = ("query", "key", "value", "attn_mask")
    for i, name in enumerate(names):
        with forward_ad.dual_level():
            dual = list(tensors)
            dual[i] = forward_ad.make_dual(tensors[i], torch.ones_like(tensors[i]))
            with pytest.raises(RuntimeError, match=f"{name}: fa::forward has no forward-mode"):
                forward(*dual)
    arguments = saved_of(*tensors)
    names = ("grad_out", "query", "key", "value", "out", "lse", "attn_mask")
    for i, name in enumerate(names):
        with forward_ad.dual_level():
            dual = list(arguments)
            dual[i] = forward_ad.make_dual(dual[i], torch.ones_like(dual[i]))
            with pytest.raises(RuntimeError, match=f"{name}: fa::backward has no forward-mode"):
                backward(*dual)


def test_functional_derivatives(device, nothing_said):
    """The op raises torch's error; the public functions leave such calls to torch, vmap inside or
    outside included."""
    query, key, value = qkv(device, torch.float32)

    def loss(query):
        return forward(query, key, value)[0].sum()

    with pytest.raises(RuntimeError, match=r"C\+\+ torch::autograd::Function with functorch"):
        torch.func.grad(loss)(query.half() if device == "cuda" else query)

    def ours(query):
        return scaled_dot_product_attention(query, key, value).square().sum()

    def theirs(query):
        return torch_sdpa(query, key, value).square().sum()

    reason = "torch.float32 on cuda" if device == "cuda" else "torch.func's derivatives"
    with sdpa_kernel(SDPBackend.MATH):
        expected = torch.func.grad(theirs)(query)
        with warns_once(reason):
            torch.testing.assert_close(torch.func.grad(ours)(query), expected)
        batch = query[None]
        both = torch.vmap(torch.func.grad(ours))(batch)
        torch.testing.assert_close(both[0], expected)
        both = torch.func.grad(lambda batch: torch.vmap(ours)(batch).sum())(batch)
        torch.testing.assert_close(both[0], expected)


# --- what is kept, and for how long ---------------------------------------------------------------


@contextlib.contextmanager
def recorded(saved):
    with saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        yield


@pytest.mark.parametrize("mask", [False, True])
def test_training_keeps_inputs_output_and_lse(device, mask):
    tensors = inputs(device)
    if mask:
        tensors.append(torch.rand(9, 13, device=device) < 0.7)
    saved = []
    with recorded(saved):
        out, lse = forward(*tensors)
    pointers = {t.data_ptr() for t in saved}
    assert pointers == {t.data_ptr() for t in (*tensors, out, lse)}
    assert len(saved) == len(tensors) + 2
    assert out.requires_grad and not lse.requires_grad


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, None])
def test_inference_keeps_nothing(device, mode):
    """Also without a mode, where nothing requires grad."""
    tensors = qkv(device)
    if mode is not None:
        tensors = [t.requires_grad_() for t in tensors]
    saved = []
    with recorded(saved), mode() if mode else contextlib.nullcontext():
        out, lse = forward(*tensors)
    assert not saved and out.grad_fn is None and not out.requires_grad
    reference = weakref.ref(lse)
    del lse
    gc.collect()
    assert reference() is None


def test_backward_frees_what_was_kept(device):
    out, lse = forward(*inputs(device))
    reference = weakref.ref(lse)
    out.sum().backward()
    del lse
    gc.collect()
    assert reference() is None
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        out.sum().backward()


def test_retain_graph(device):
    tensors = inputs(device)
    out = forward(*tensors)[0]
    grad_out = torch.randn_like(out)
    first = torch.autograd.grad(out, tensors, grad_out, retain_graph=True)
    second = torch.autograd.grad(out, tensors, 2 * grad_out)
    for a, b in zip(first, second, strict=True):
        close(2 * a, b, torch.float16)


@pytest.mark.parametrize("which", [(0,), (1,), (2,), (0, 2), (1, 2)], ids=str)
def test_only_some_inputs_require_grad(device, which):
    tensors = qkv(device)
    for i in which:
        tensors[i].requires_grad_()
    out = scaled_dot_product_attention(*tensors)
    grad_out = torch.randn_like(out)
    out.backward(grad_out)
    expected = backward(grad_out, *tensors, *forward(*tensors))
    for i, (tensor, other) in enumerate(zip(tensors, expected, strict=True)):
        assert (tensor.grad is not None) == (i in which)
        if i in which:
            close(tensor.grad, other.detach(), torch.float16)


class NoGradient(torch.autograd.Function):
    """Hands an undefined gradient on."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


def test_undefined_gradient_of_the_output(device):
    """It costs no kernel and gives none."""
    tensors = inputs(device)
    out = forward(*tensors)[0]
    with Calls() as calls:
        NoGradient.apply(out).sum().backward()
    assert not calls.calls and all(t.grad is None for t in tensors)


def test_saved_tensor_that_was_changed_is_noticed(device):
    for i in range(5):
        tensors = inputs(device)
        everything = [*tensors, *forward(*tensors)]
        with torch.no_grad():
            everything[i].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            everything[3].sum().backward()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(device, use_reentrant):
    tensors = inputs(device, k=(2, 4, 13, 16))

    def attend(*tensors):
        return scaled_dot_product_attention(*tensors, is_causal=True) * 2

    again = plain(tensors)
    expected = attend(*tensors)
    saved = []
    with recorded(saved):
        out = checkpoint(attend, *again, use_reentrant=use_reentrant)
    assert saved and not any(t.shape == (2, 4, 9) for t in saved)  # no lse
    assert torch.equal(out, expected)
    grad_out = torch.randn_like(out)
    for result, leaves in ((out, again), (expected, tensors)):
        result.backward(grad_out)
        assert all(t.grad is not None for t in leaves)
    for a, b in zip(again, tensors, strict=True):
        close(a.grad, b.grad, torch.float16)


# --- the public functions -------------------------------------------------------------------------


def test_drop_in_trains_with_our_kernels(device):
    """No warning, one call of each operator, whatever its arguments."""
    for options in ({}, {"is_causal": True}, {"scale": -0.2}, {"attn_mask": True}):
        query, key, value = inputs(device, k=(2, 4, 13, 16))
        if "attn_mask" in options:
            options = {"attn_mask": torch.rand(9, 13, device=device) < 0.7}
        with silent(), Calls() as calls:
            out = scaled_dot_product_attention(query, key, value, **options)
            out.sum().backward()
        assert len(calls.calls) == 1
        options = dict(options)
        mask = options.pop("attn_mask", None)
        detached = [t.detach() for t in (query, key, value)]
        expected = check_gradients(*detached, mask, grad_out=torch.ones_like(out), **options)
        for tensor, gradient in zip((query, key, value), expected, strict=True):
            close(tensor.grad, gradient, torch.float16)


@pytest.mark.parametrize(
    "shapes",
    [((9, 16), (13, 16)), ((3, 9, 16), (3, 13, 16)), ((2, 3, 4, 9, 16), (2, 1, 4, 13, 16))],
    ids=["2-D", "3-D", "5-D"],
)
def test_gradients_of_other_ranks(device, shapes):
    """Summed over what was broadcast."""
    tensors = inputs(device, q=shapes[0], k=shapes[1])
    doubles = [t.detach().double().requires_grad_() for t in tensors]
    out = scaled_dot_product_attention(*tensors)
    grad_out = torch.randn_like(out)
    out.backward(grad_out)
    with sdpa_kernel(SDPBackend.MATH):
        torch_sdpa(*doubles).backward(grad_out.double())
    for ours, expected in zip(tensors, doubles, strict=True):
        torch.testing.assert_close(ours.grad.double(), expected.grad, rtol=1e-2, atol=1e-2)


def test_flash_attn_func_trains(device):
    q, k, v = inputs(device, q=(2, 9, 4, 16), k=(2, 13, 2, 16))
    with silent(), Calls() as calls:
        out, lse, _ = flash_attn_func(
            q, k, v, causal=True, window_size=(3, -1), return_attn_probs=True
        )
        grad_out = torch.randn_like(out)
        out.backward(grad_out)
    assert len(calls.calls) == 1 and not lse.requires_grad
    expected = check_gradients(
        *(t.detach().transpose(1, 2) for t in (q, k, v)),
        grad_out=grad_out.transpose(1, 2),
        is_causal=True,
        window_left=3,
        bottom_right=True,
    )
    for tensor, gradient in zip((q, k, v), expected, strict=True):
        close(tensor.grad, gradient.transpose(1, 2), torch.float16)


def test_packed_projection(device):
    """Query, key and value are views of one tensor, whose gradient is all three."""
    packed = randn(2, 9, 3, 4, 16, device=device).requires_grad_()
    out = flash_attn_func(*packed.unbind(2), causal=True)
    grad_out = torch.randn_like(out)
    out.backward(grad_out)
    parts = [t.detach().transpose(1, 2) for t in packed.unbind(2)]
    expected = check_gradients(*parts, grad_out=grad_out.transpose(1, 2), is_causal=True)
    for ours, gradient in zip(packed.grad.unbind(2), expected, strict=True):
        close(ours, gradient.transpose(1, 2), torch.float16)


GRADCHECK = {
    "plain": lambda: (None, {}),
    "causal": lambda: (None, {"is_causal": True}),
    "bottom right, negative scale": lambda: (
        None,
        {"is_causal": True, "bottom_right": True, "scale": -0.7},
    ),
    "window": lambda: (None, {"window_left": 2, "window_right": 1}),
    "bool mask": lambda: (torch.rand(2, 1, 7, 5) < 0.6, {}),
    "additive mask": lambda: (3 * torch.randn(4, 7, 5, dtype=torch.float64), {"is_causal": True}),
    "float32 mask far down": lambda: (torch.randn(7, 5) - 1e4, {}),
}


@pytest.mark.parametrize("case", GRADCHECK)
def test_gradcheck(case):
    """Against finite differences of forward itself."""
    mask, options = GRADCHECK[case]()
    tensors = inputs("cpu", torch.float64, q=(2, 4, 7, 3), k=(2, 2, 5, 3))

    def attend(*tensors):
        return forward(*tensors, mask, **options)[0]

    assert torch.autograd.gradcheck(attend, tensors)


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
