"""fa::forward_varlen and fa::backward_varlen as the dispatcher, autograd and torch.compile see
them, and what other libraries' packed sequences broke on."""

import functools

import pytest
import torch
from backward_calls import plain
from calls import silent, warns_once
from cases import DTYPES, randn
from packed import Packed, backward_varlen, forward_varlen, int32, starts
from reference import close
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from flashattn_ext import flash_attn_func, flash_attn_varlen_func, interface


@pytest.fixture
def fresh_dynamo(monkeypatch):
    """No compiled code, and no warning given, before or after."""
    monkeypatch.setattr(interface, "_warned", set())
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


needs_compile = pytest.mark.usefixtures("fresh_dynamo")

LENGTHS = [(5, 7), (0, 2), (9, 6)]


def small(device, dtype=torch.float16, **options):
    return Packed(device, LENGTHS, (4, 2), 16, dtype, **options)


def leaves(packed):
    return plain(packed.tensors)


def saved_of(packed, **options):
    """What fa::backward_varlen takes."""
    out, lse = forward_varlen(*packed.arguments, **options)
    lengths = packed.cu_seqlens_q, packed.cu_seqlens_k
    return packed.grad_out, *packed.tensors, out, lse, *lengths


# --- Schema, opcheck, fake kernels ----------------------------------------------------------------


def test_schema():
    tail = (
        "Tensor cu_seqlens_q, Tensor cu_seqlens_k, bool is_causal=False, float? scale=None, *, "
        "SymInt window_left=-1, SymInt window_right=-1, Tensor? seqused_k=None, "
        "bool deterministic=False) -> "
    )
    assert str(forward_varlen._schema) == (
        f"fa::forward_varlen(Tensor query, Tensor key, Tensor value, {tail}(Tensor out, Tensor lse)"
    )
    assert str(backward_varlen._schema) == (
        "fa::backward_varlen(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, "
        f"Tensor lse, {tail}(Tensor grad_query, Tensor grad_key, Tensor grad_value)"
    )
    for op in (forward_varlen, backward_varlen):
        assert {torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides} <= set(op.tags)


OPCHECK = {
    "plain": {},
    "window": {"is_causal": True, "window_left": 3},
    "used": {"used": [7, 0, 3]},
    "padding": {"padding": (2, 3)},
}


@needs_compile
@pytest.mark.parametrize("case", OPCHECK)
def test_opcheck(device, case):
    """Both ops: schema, autograd registration, fake kernel, and tracing of forward and backward."""
    options = dict(OPCHECK[case])
    made = {name: options.pop(name) for name in ("used", "padding") if name in options}
    packed = small(device, **made)
    # opcheck compares without regard for NaN in the same places.
    for tensor in (*packed.tensors, packed.grad_out):
        tensor.nan_to_num_(0.5)
    options["seqused_k"] = packed.seqused_k
    results = torch.library.opcheck(
        backward_varlen, saved_of(packed, **options), options | {"deterministic": True}
    )
    assert set(results.values()) == {"SUCCESS"} and len(results) == 4
    arguments = (*leaves(packed), packed.cu_seqlens_q, packed.cu_seqlens_k)
    results = torch.library.opcheck(forward_varlen, arguments, options)
    assert set(results.values()) == {"SUCCESS"} and len(results) == 4


@pytest.mark.parametrize("transposed", [False, True])
def test_strides(device, transposed):
    """Results are laid out as empty_like of their tensors, and the fake kernels agree."""
    packed = small(device)
    if transposed:
        packed.query, packed.value = (
            x.transpose(0, 1).contiguous().transpose(0, 1) for x in (packed.query, packed.value)
        )
    arguments = saved_of(packed)
    ours = (*forward_varlen(*packed.arguments), *backward_varlen(*arguments))
    with FakeTensorMode() as mode:
        convert = mode.from_tensor
        fakes = (
            *forward_varlen(*map(convert, packed.arguments)),
            *backward_varlen(*map(convert, arguments)),
        )
    for result, fake in zip(ours, fakes, strict=True):
        assert (result.shape, result.stride()) == (fake.shape, fake.stride())
        assert (result.dtype, result.device) == (fake.dtype, fake.device)
    for result, tensor in zip(ours[2:], packed.tensors, strict=True):
        assert result.stride() == torch.empty_like(tensor).stride()


def test_meta_tensors():
    arguments = [x.to("meta") for x in small("cpu").arguments]
    out, lse = forward_varlen(*arguments)
    assert out.shape == arguments[0].shape and lse.shape == (4, 14)
    for i, name in ((1, "key"), (3, "cu_seqlens_q"), (4, "cu_seqlens_k")):
        mixed = list(arguments)
        mixed[i] = torch.zeros(mixed[i].shape, dtype=mixed[i].dtype)
        with pytest.raises(RuntimeError, match=rf"{name}: device must equal .* got cpu"):
            forward_varlen(*mixed)


# --- Errors ---------------------------------------------------------------------------------------

BAD_CALLS = {
    "rank": (
        lambda q, k, v, cq, ck: (q[None], k, v, cq, ck),
        r"query: must have 3 dimensions \(total, heads, head_dim\), got 4: \(1, 14, 4, 16\)",
    ),
    "rank of value": (lambda q, k, v, cq, ck: (q, k, v[0], cq, ck), r"value: must have 3 dim"),
    "dtype": (
        lambda q, k, v, cq, ck: (q, k.float(), v, cq, ck),
        r"key: dtype must equal that of query \(Half\), got Float",
    ),
    "head_dim": (
        lambda q, k, v, cq, ck: (q, k[..., :8], v[..., :8], cq, ck),
        r"key: head_dim must equal that of query \(16\), got 8",
    ),
    "large head_dim": (
        lambda q, k, v, cq, ck: (*(x.repeat(1, 1, 17) for x in (q, k, v)), cq, ck),
        r"query: head_dim must be 1 to 256, got 272",
    ),
    "heads": (
        lambda q, k, v, cq, ck: (q[:, :3], k, v, cq, ck),
        r"key: heads must divide those of query \(3\), got 2; .* query is \(14, 3, 16\)",
    ),
    "value": (
        lambda q, k, v, cq, ck: (q, k, v[1:], cq, ck),
        r"value: shape must equal that of key \(15, 2, 16\), got \(14, 2, 16\)",
    ),
    "dtype of lengths": (
        lambda q, k, v, cq, ck: (q, k, v, cq.long(), ck),
        r"cu_seqlens_q: dtype must be int32, got Long",
    ),
    "rank of lengths": (
        lambda q, k, v, cq, ck: (q, k, v, cq, ck[None]),
        r"cu_seqlens_k: shape must be \(sequences \+ 1,\), got \(1, 4\)",
    ),
    "no lengths": (
        lambda q, k, v, cq, ck: (q, k, v, cq[:0], ck[:0]),
        r"cu_seqlens_q: shape must be \(sequences \+ 1,\), got \(0,\)",
    ),
    "other sequences": (
        lambda q, k, v, cq, ck: (q, k, v, cq, ck[1:]),
        r"cu_seqlens_k: shape must equal that of cu_seqlens_q \(4,\), got \(3,\)",
    ),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_errors_name_argument_rule_and_value(device, case):
    make, message = BAD_CALLS[case]
    packed = small(device)
    arguments = make(*packed.arguments)
    with pytest.raises(RuntimeError, match=message):
        forward_varlen(*arguments)
    grad_out, *_, out, lse, _, _ = saved_of(packed)
    with pytest.raises(RuntimeError, match=message):
        backward_varlen(grad_out, *arguments[:3], out, lse, *arguments[3:])


def test_errors_of_options(device):
    packed = small(device)
    for options, message in (
        ({"seqused_k": int32([1, 2], device)}, r"seqused_k: shape must be \(sequences,\) with 3"),
        ({"seqused_k": int32([1, 2, 3], device).long()}, "seqused_k: dtype must be int32, got L"),
        ({"window_left": -2}, "window_left: must be -1"),
    ):
        with pytest.raises(RuntimeError, match=message):
            forward_varlen(*packed.arguments, **options)


def test_errors_of_what_forward_returned(device):
    arguments = saved_of(small(device))
    for i, wrong, message in (
        (0, arguments[0][1:], r"grad_out: shape must be \(14, 4, 16\), got \(13, 4, 16\)"),
        (4, arguments[4].float(), r"out: dtype must equal that of query \(Half\), got Float"),
        (5, arguments[5].mT, r"lse: shape must be \(4, 14\), got \(14, 4\)"),
    ):
        with pytest.raises(RuntimeError, match=message):
            backward_varlen(*arguments[:i], wrong, *arguments[i + 1 :])


@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_float32_on_cuda(device):
    packed = small(device, torch.float32)
    with pytest.raises(RuntimeError, match="query: dtype must be float16 or bfloat16 on CUDA"):
        forward_varlen(*packed.arguments)


# --- The public function --------------------------------------------------------------------------


def test_flash_arguments(device):
    """Names, defaults and their meaning as in flash-attn."""
    packed = small(device, padding=(1, 2))
    out, lse, nothing = flash_attn_varlen_func(
        *packed.arguments, 9, 7, 0.0, 0.3, True, (3, 4), return_attn_probs=True
    )
    expected = packed.check_forward(scale=0.3, is_causal=True, window_left=3, window_right=4)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1]) and nothing is None
    assert torch.equal(
        flash_attn_varlen_func(*packed.arguments, softmax_scale=0.3),
        forward_varlen(*packed.arguments, False, 0.3)[0],
    )
    used = int32([2, 1, 4], device)
    assert torch.equal(
        flash_attn_varlen_func(*packed.arguments, seqused_k=used),
        forward_varlen(*packed.arguments, seqused_k=used)[0],
    )


def test_flash_refusals(device):
    call = functools.partial(flash_attn_varlen_func, *small(device).arguments)
    for options, message in (
        ({"dropout_p": 0.1}, "dropout_p: dropout is not supported, got 0.1"),
        ({"softcap": 3.0}, "softcap: capped scores are not supported, got 3.0"),
        ({"alibi_slopes": torch.ones(4)}, "alibi_slopes: ALiBi is not supported"),
        ({"window_size": 3}, "window_size: must be two integers"),
        ({"window_size": (-2, 0)}, "window_size: sides must be -1"),
    ):
        with pytest.raises(RuntimeError, match=message):
            call(**options)
    with pytest.raises(TypeError, match="softmax_scale: must be a float"):
        call(softmax_scale=torch.tensor(0.1))


def test_dtypes_that_nobody_computes(device, nothing_said):
    cu_seqlens = torch.tensor([0, 4], dtype=torch.int32, device=device)
    for dtype in (torch.int32, torch.float8_e4m3fn, torch.complex64):
        x = torch.ones(4, 2, 16, device=device).to(dtype)
        for call in (
            lambda x=x: flash_attn_varlen_func(x, x, x, cu_seqlens, cu_seqlens),
            lambda x=x: flash_attn_func(x[None], x[None], x[None]),
            lambda x=x: interface.scaled_dot_product_attention(x, x, x),
        ):
            with silent(), pytest.raises(RuntimeError, match=r"query: dtype must be float16.* got"):
                call()


@pytest.mark.parametrize("is_causal", [False, True])
def test_what_goes_to_torch(device, is_causal, nothing_said):
    """float32 on a GPU, and head_dims that no kernel has: one sequence after the other."""
    head_dim = 16 if device == "cuda" else 264
    packed = Packed(device, LENGTHS, (4, 2), head_dim, torch.float32, used=[3, 0, 6])
    for tensor in packed.tensors:  # torch's own attention lets NaN of hidden keys through
        tensor.nan_to_num_()
    query, key, value = leaves(packed)
    call = functools.partial(
        flash_attn_varlen_func,
        *(query, key, value, packed.cu_seqlens_q, packed.cu_seqlens_k),
        causal=is_causal,
        seqused_k=packed.seqused_k,
        return_attn_probs=True,
    )
    with warns_once("torch.float32 on cuda" if device == "cuda" else "a head_dim outside"):
        out, lse, _ = call()
    out.backward(packed.grad_out)
    for b in range(len(LENGTHS)):
        q, k, v = (
            packed.queries(query, b), packed.keys(key, b), packed.keys(value, b)
        )  # fmt: skip
        ours = (packed.queries(out, b), lse[:, packed.starts_q[b] : packed.starts_q[b + 1]])
        expected, expected_lse, _ = flash_attn_func(
            *(x.transpose(1, 2) for x in (q, k, v)), causal=is_causal, return_attn_probs=True
        )
        torch.testing.assert_close(ours[0], expected.transpose(1, 2))
        torch.testing.assert_close(ours[1], expected_lse[0])
    assert query.grad.isfinite().all() and (key.grad[3:9] == 0).all()
    with pytest.raises(RuntimeError, match=r"q, k, v: must be .* got \(14, 3, "):
        flash_attn_varlen_func(query[:, :3], key, value, *packed.arguments[3:])


def test_other_head_dims_of_value(device, nothing_said):
    """As flash_attn_func: out has that of value."""
    query, key, value = (randn(5, 2, size, device=device) for size in (64, 64, 32))
    lengths = int32([0, 2, 5], device)
    with warns_once("a head_dim of value"):
        out = flash_attn_varlen_func(query, key, value, lengths, lengths, 3, 3)
    assert out.shape == (5, 2, 32)


@pytest.mark.filterwarnings("ignore:flashattn_ext")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"cu_seqlens_q": [0, 8, 4]},
            "cu_seqlens_q: must ascend .* 10 rows of q, got 4 after 8",
        ),
        ({"cu_seqlens_q": [0, 4, 14]}, "cu_seqlens_q: must ascend .* got 14 after 4 at 2"),
        ({"cu_seqlens_k": [-3, 5, 12]}, "cu_seqlens_k: must ascend .* 12 rows of k, got -3"),
        ({"cu_seqlens_k": [0, 5]}, r"cu_seqlens_k: must be int32 of shape \(3,\), got .* \(2,\)"),
        ({"seqused_k": [7, 3]}, r"seqused_k: must be 0 to .* \(5\), got 7 for sequence 0"),
        ({"seqused_k": [-2, 3]}, "seqused_k: must be 0 to .* got -2 for sequence 0"),
        ({"seqused_k": [1]}, r"seqused_k: must be int32 of shape \(2,\), got .* \(1,\)"),
        ({"cu_seqlens_q": []}, "cu_seqlens_q: must be int32 of shape "),
    ],
)
def test_wrong_lengths_go_nowhere(device, changes, message):
    """Where torch computes, the lengths are checked on CUDA too."""
    lengths = {"cu_seqlens_q": [0, 4, 10], "cu_seqlens_k": [0, 5, 12], **changes}
    query, key = (randn(*shape, 264, device=device) for shape in ((10, 4), (12, 2)))
    tensors = {name: int32(numbers, device) for name, numbers in lengths.items()}
    with pytest.raises(RuntimeError, match=message):
        flash_attn_varlen_func(query, key, key, max_seqlen_q=6, max_seqlen_k=7, **tensors)


# --- Autograd and modes ---------------------------------------------------------------------------


class Calls(TorchDispatchMode):
    """The calls of fa::backward_varlen that reach a kernel, by their keyword arguments."""

    def __enter__(self):
        self.calls = []
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is backward_varlen:
            self.calls.append(kwargs)
        return func(*args, **(kwargs or {}))


def test_gradients_of_the_public_function(device):
    for dtype in DTYPES[device]:
        packed = small(device, dtype, used=[7, 1, 3], padding=(0, 3))
        tensors = leaves(packed)
        options = {"window_left": 4, "is_causal": True}
        out = flash_attn_varlen_func(
            *tensors, packed.cu_seqlens_q, packed.cu_seqlens_k, causal=True, window_size=(4, -1),
            seqused_k=packed.seqused_k, deterministic=True,
        )  # fmt: skip
        out.backward(packed.grad_out)
        expected = packed.check(f"{dtype}", deterministic=True, **options)
        assert torch.equal(out, expected[0])
        for tensor, other in zip(tensors, expected[2:], strict=True):
            assert torch.equal(tensor.grad, other)


def test_deterministic_mode(device):
    query, key, value = leaves(small(device))
    lengths = small(device).arguments[3:]
    for option, mode in ((False, False), (True, False), (False, True)):
        out = flash_attn_varlen_func(query, key, value, *lengths, deterministic=option)
        torch.use_deterministic_algorithms(mode)
        try:
            with Calls() as calls:
                out.sum().backward()
        finally:
            torch.use_deterministic_algorithms(False)
        (call,) = calls.calls
        assert bool(call.get("deterministic")) == (option or mode)


def test_training_keeps_inputs_output_and_lse(device):
    packed = small(device, used=[7, 1, 3])
    tensors, saved = leaves(packed), []
    lengths = packed.cu_seqlens_q, packed.cu_seqlens_k
    with saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out, lse = forward_varlen(*tensors, *lengths, seqused_k=packed.seqused_k)
    kept = {t.data_ptr() for t in (*tensors, *lengths, packed.seqused_k, out, lse)}
    assert {t.data_ptr() for t in saved} == kept
    assert out.requires_grad and not lse.requires_grad
    saved.clear()
    with saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t), torch.no_grad():
        assert not forward_varlen(*tensors, *lengths)[0].requires_grad
    assert not saved


@pytest.mark.parametrize("which", [(0,), (1,), (2,), (0, 2)], ids=str)
def test_only_some_inputs_require_grad(device, which):
    packed = small(device)
    tensors = [t.clone() for t in packed.tensors]
    for i in which:
        tensors[i].requires_grad_()
    lengths = packed.cu_seqlens_q, packed.cu_seqlens_k
    flash_attn_varlen_func(*tensors, *lengths).backward(packed.grad_out)
    expected = backward_varlen(*saved_of(packed))
    for i, (tensor, other) in enumerate(zip(tensors, expected, strict=True)):
        assert (tensor.grad is not None) == (i in which)
        if i in which:
            close(tensor.grad, other, torch.float16)


def test_no_derivative_of_a_derivative(device):
    packed = small(device)
    tensors = leaves(packed)
    out = flash_attn_varlen_func(*tensors, *packed.arguments[3:])
    gradients = torch.autograd.grad(out.sum(), tensors, create_graph=True)
    for gradient in gradients:
        with pytest.raises(RuntimeError, match=r"fa::backward_varlen: .* no derivative"):
            gradient.sum().backward(retain_graph=True)


def test_no_forward_mode_derivative(device):
    packed = small(device)
    for op, arguments, names in (
        (forward_varlen, packed.arguments, ("query", "key", "value")),
        (
            backward_varlen,
            saved_of(packed),
            ("grad_out", "query", "key", "value", "out", "lse"),
        ),
    ):
        for i, name in enumerate(names):
            with forward_ad.dual_level():
                dual = list(arguments)
                dual[i] = forward_ad.make_dual(dual[i], torch.ones_like(dual[i]))
                with pytest.raises(RuntimeError, match=rf"{name}: {op.name()} has no forward-mode"):
                    op(*dual)


def test_no_vmap(device):
    packed = small(device)
    query, key, value, *lengths = packed.arguments
    for op, arguments in ((forward_varlen, packed.arguments), (backward_varlen, saved_of(packed))):
        mapped = [torch.stack([arguments[0]] * 2), *arguments[1:]]
        with pytest.raises(RuntimeError, match=rf"{op.name()}: has no vmap rule"):
            torch.vmap(op, in_dims=(0, *[None] * (len(mapped) - 1)))(*mapped)
    with pytest.raises(RuntimeError, match="has no vmap rule"):
        torch.vmap(lambda x: flash_attn_varlen_func(x, key, value, *lengths))(query[None])


def test_functional_derivatives(device, nothing_said):
    """The public function leaves them to torch."""
    packed = small(device, torch.float32)
    query, *rest = packed.arguments

    def loss(query):
        return flash_attn_varlen_func(query, *rest, causal=True).square().sum()

    reason = "torch.float32 on cuda" if device == "cuda" else "torch.func's derivatives"
    with sdpa_kernel(SDPBackend.MATH), warns_once(reason):
        ours = torch.func.grad(loss)(query)
    query = query.clone().requires_grad_()
    loss(query).backward()
    torch.testing.assert_close(ours, query.grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(device, dtype):
    packed = small(device, torch.float32)
    tensors = leaves(packed)
    low = [t.to(dtype) for t in packed.tensors]
    lengths = packed.cu_seqlens_q, packed.cu_seqlens_k
    with torch.autocast(device, dtype), silent():
        out, lse = forward_varlen(*tensors, *lengths)
        public = flash_attn_varlen_func(*tensors, *lengths)
    expected = forward_varlen(*low, *lengths)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    assert torch.equal(out, public)
    public.sum().backward()
    assert all(t.grad.dtype == torch.float32 for t in tensors)


# --- torch.compile --------------------------------------------------------------------------------


@needs_compile
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiled_training(device, dynamic):
    """One graph for all lengths and all numbers of rows; a new number of sequences too."""
    counter = CompileCounterWithBackend("aot_eager")

    def attend(*arguments):
        return flash_attn_varlen_func(*arguments, causal=True, window_size=(5, -1))

    function = torch.compile(attend, fullgraph=True, dynamic=dynamic, backend=counter)
    compilations = []
    for lengths in ([(5, 7), (9, 6)], [(30, 31), (2, 8), (1, 0)], [(3, 3)] * 5):
        packed = Packed(device, lengths, (4, 2), 16, torch.float16)
        results = []
        for call in (function, attend):
            tensors = leaves(packed)
            out = call(*tensors, packed.cu_seqlens_q, packed.cu_seqlens_k, 99, 99)
            out.backward(packed.grad_out)
            results.append((out, *(t.grad for t in tensors)))
        for ours, expected in zip(*results, strict=True):
            close(ours, expected, torch.float16)
            assert ours.stride() == expected.stride()
        compilations.append(counter.frame_count)
    assert not dynamic or len(set(compilations)) == 1


@needs_compile
def test_exported(device):
    class Attention(torch.nn.Module):
        def forward(self, *arguments):
            return flash_attn_varlen_func(*arguments, causal=True)

    packed = small(device)
    rows_q, rows_k = torch.export.Dim("rows_q", min=2), torch.export.Dim("rows_k", min=2)
    sequences = torch.export.Dim("sequences", min=2)
    program = torch.export.export(
        Attention(),
        packed.arguments,
        dynamic_shapes={
            "arguments": ({0: rows_q}, {0: rows_k}, {0: rows_k}, {0: sequences}, {0: sequences})
        },
    )
    assert sum(node.target is forward_varlen for node in program.graph.nodes) == 1
    other = Packed(device, [(3, 40), (21, 2), (4, 4), (1, 1)], (4, 2), 16, torch.float16)
    for each in (packed, other):
        expected = flash_attn_varlen_func(*each.arguments, causal=True)
        torch.testing.assert_close(program.module()(*each.arguments), expected)


# --- torch's flop counter -------------------------------------------------------------------------


def flops(function):
    with FlopCounterMode(display=False) as counter:
        function()
    return {str(operator): count for operator, count in counter.get_flop_counts()["Global"].items()}


def test_flops(device):
    """Those of each sequence; on fake tensors, which have no lengths, of equal sequences."""
    packed = small(device, used=[7, 1, 3])
    tensors = leaves(packed)
    lengths = packed.cu_seqlens_q, packed.cu_seqlens_k
    results = []
    ours = flops(lambda: results.append(flash_attn_varlen_func(*tensors, *lengths)))
    product = 2 * 4 * 16 * (5 * 7 + 0 * 2 + 9 * 6)
    assert ours == {"fa.forward_varlen": 2 * product}
    assert flops(lambda: results[0].sum().backward()) == {"fa.backward_varlen": 5 * product}
    ours = flops(lambda: forward_varlen(*packed.arguments, seqused_k=packed.seqused_k))
    assert ours == {"fa.forward_varlen": 4 * 4 * 16 * (5 * 7 + 9 * 3)}
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in packed.arguments]
        assert flops(lambda: forward_varlen(*fakes)) == {
            "fa.forward_varlen": 4 * 4 * 16 * 14 * 15 // 3
        }


# --- Reports of other libraries' bugs; the numbers are of the list of test_bug_reports.py ---------


def test_r51_empty_sequence_between_single_queries(device):
    """FA#1537: bfloat16, causal, 9 and 3 heads, head_dim 64, query lengths 1, 0, 1: a reshape
    failed, as one query a sequence was taken for granted when the longest has one."""
    for dtype in DTYPES[device]:
        for lengths in ([(1, 5), (0, 7), (1, 1)], [(1, 0), (0, 0), (1, 200)]):
            packed = Packed(device, lengths, (9, 3), 64, dtype)
            packed.check(f"{dtype} {lengths}", is_causal=True)


def test_r53_sequences_without_queries_in_the_backward(device):
    """FA#2562: head_dim 256, 4 heads on 1, bfloat16, query starts 0, 0, 1208, 2048, 2048 and long
    keys: an illegal access. Gradients of keys that no query sees are exactly 0."""
    lengths = [(0, 1500), (1208, 1300), (840, 900), (0, 2000)]
    small = [(q // 8, k // 8) for q, k in lengths]
    for is_causal in (False, True):
        Packed(device, small, (4, 1), 256).check(is_causal=is_causal)
        if device == "cpu":
            continue
        packed = Packed(device, lengths, (4, 1), 256)
        out, lse = packed.forward(is_causal=is_causal)
        gradients = packed.backward(out, lse, is_causal=is_causal)
        assert all(x.isfinite().all() for x in gradients)
        for gradient in gradients[1:]:
            assert (packed.keys(gradient, 0) == 0).all()
            assert (packed.keys(gradient, 3) == 0).all()


def test_r55_lengths_beyond_the_tensors(device):
    """FA#2381, TF#44911: starts 0, 256, 512, 768 for 256 tokens: read past the tensors."""
    tensors = [randn(256, 2, 64, device=device) for _ in range(3)]
    cu_seqlens = int32(starts([256] * 3), device)
    if device == "cpu":
        with pytest.raises(RuntimeError, match=r"cu_seqlens_q: must ascend .* got 512"):
            forward_varlen(*tensors, cu_seqlens, cu_seqlens)
        return
    out, lse = forward_varlen(*tensors, cu_seqlens, cu_seqlens, True)
    gradients = backward_varlen(*tensors[:1], *tensors, out, lse, cu_seqlens, cu_seqlens, True)
    only = int32([0, 256], device)
    expected = forward_varlen(*tensors, only, only, True)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    expected = backward_varlen(*tensors[:1], *tensors, *expected, only, only, True)
    for ours, other in zip(gradients, expected, strict=True):
        close(ours, other, torch.float16)


def test_r88_pages(device):
    """FA#1217: packed queries, keys in pages and several splits together were wrong. Here pages are
    refused."""
    packed = small(device)
    table = torch.zeros(3, 1, dtype=torch.int32, device=device)
    with pytest.raises(NotImplementedError, match=r"block_table: .* use flash_attn_with_kvcache"):
        flash_attn_varlen_func(*packed.arguments, block_table=table)


@needs_compile
def test_r96_a_layer_of_packed_sequences_in_one_graph(device):
    """TF#41803, DF#11957: the longest length was fetched to the host, which broke the graph."""
    project = torch.nn.Linear(32, 96, device=device, dtype=torch.float16)

    def layer(x, cu_seqlens):
        q, k, v = project(x).unflatten(-1, (3, 2, 16)).unbind(1)
        longest = cu_seqlens.diff().max()  # stays on the device
        return flash_attn_varlen_func(
            q, k, v, cu_seqlens, cu_seqlens, longest, longest, causal=True
        ).flatten(1)

    function = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for lengths in ([5, 9, 2], [40, 1]):
        x = randn(sum(lengths), 32, device=device)
        cu_seqlens = int32(starts(lengths), device)
        close(function(x, cu_seqlens), layer(x, cu_seqlens), torch.float16)
