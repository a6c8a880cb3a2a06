"""The derivative of fa::forward as autograd and the dispatcher see it: what is kept, what is
refused, and that the public functions have it."""

import contextlib
import gc
import weakref

import pytest
import torch
from backward_calls import Calls, backward, forward, inputs, plain, saved_of
from calls import qkv, randn, silent, torch_sdpa, warns_once
from reference import check_gradients, close
from test_op_contract import LAYOUTS
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
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
