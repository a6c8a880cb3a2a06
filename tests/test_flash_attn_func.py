"""flash_attn_func: flash-attn's names, layout and corner, and calls left to torch."""

import pytest
import torch
from calls import OperatorLog, assert_close, randn, silent, torch_sdpa, warns_once
from reference import attention_ref, visible_band

from flashattn_ext import flash_attn_func, interface


def flash_inputs(device, dtype=torch.float16, *, seqlen_q=9, seqlen_k=13, heads=(4, 2), dim=16):
    return [
        randn(2, seqlen, h, dim, device=device, dtype=dtype)
        for seqlen, h in ((seqlen_q, heads[0]), (seqlen_k, heads[1]), (seqlen_k, heads[1]))
    ]


def heads_first(*tensors):
    return [t.transpose(1, 2) for t in tensors]


FLASH_OPTIONS = {
    "full": ({}, {}),
    "causal": ({"causal": True}, {"is_causal": True}),
    "scale": ({"softmax_scale": 0.4}, {"scale": 0.4}),
    "window": ({"window_size": (3, 2)}, {"window_left": 3, "window_right": 2}),
    "left": ({"window_size": (2, -1)}, {"window_left": 2}),
    "right": ({"window_size": (-1, 1)}, {"window_right": 1}),
    "diagonal": ({"window_size": (0, 0)}, {"window_left": 0, "window_right": 0}),
    "causal window": (
        {"causal": True, "window_size": (4, 3)},
        {"is_causal": True, "window_left": 4, "window_right": 3},
    ),
    "list": ({"window_size": [1, -1]}, {"window_left": 1}),
    "deterministic": ({"deterministic": True}, {}),
}


@pytest.mark.parametrize("lengths", [(9, 13), (13, 9), (1, 7), (9, 9)], ids=str)
@pytest.mark.parametrize("case", FLASH_OPTIONS)
def test_flash(device, case, lengths):
    options, meaning = FLASH_OPTIONS[case]
    q, k, v = flash_inputs(device, seqlen_q=lengths[0], seqlen_k=lengths[1])
    with silent(), OperatorLog() as log:
        out, lse, probabilities = flash_attn_func(q, k, v, return_attn_probs=True, **options)
    assert probabilities is None
    # Views in and out, nothing copied.
    transpose = torch.ops.aten.transpose.int
    assert log.operators == [transpose] * 3 + [torch.ops.fa.forward.default, transpose]
    assert out.shape == q.shape and out.is_contiguous() and lse.dtype == torch.float32
    four = heads_first(q, k, v)
    assert_close(out.transpose(1, 2), *four, bottom_right=True, **meaning)
    reference = attention_ref(*four, bottom_right=True, **meaning)
    torch.testing.assert_close(lse.double(), reference.lse, atol=1e-3, rtol=1e-5)
    assert torch.equal(flash_attn_func(q, k, v, **options), out)


def test_flash_positional_arguments():
    """In flash-attn's order: dropout_p, softmax_scale, causal, window_size."""
    q, k, v = flash_inputs("cpu")
    out = flash_attn_func(q, k, v, 0.0, 0.3, True, (2, -1))
    assert torch.equal(
        out, flash_attn_func(q, k, v, softmax_scale=0.3, causal=True, window_size=(2, -1))
    )
    meaning = {"scale": 0.3, "is_causal": True, "window_left": 2, "bottom_right": True}
    assert_close(out.transpose(1, 2), *heads_first(q, k, v), **meaning)


def test_flash_output_layout_follows_q(device):
    """A (B, H, S, D) tensor given as a transposed view gives back such a view."""
    q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in flash_inputs(device))
    out = flash_attn_func(q, k, v)
    assert out.stride() == q.stride() and not out.is_contiguous()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropout_p": 0.1}, r"dropout_p: .* got 0.1; pass 0.0"),
        ({"softcap": 30.0}, r"softcap: .* got 30.0; pass 0.0"),
        ({"alibi_slopes": torch.ones(4)}, r"alibi_slopes: .* pass None"),
    ],
)
def test_flash_refuses_unsupported_options(options, message):
    with pytest.raises(NotImplementedError, match=message):
        flash_attn_func(*flash_inputs("cpu"), **options)
    assert issubclass(NotImplementedError, RuntimeError)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("window_size", [(-3, 0), (0, -2)], ids=str)
def test_flash_refuses_other_negative_windows(window_size, grad):
    q, k, v = flash_inputs("cpu")
    q.requires_grad_(grad)
    with pytest.raises(RuntimeError, match=r"window_size: .* -1 .* got \(-?\d, -?\d\)"):
        flash_attn_func(q, k, v, window_size=window_size)


FLASH_BAD_SHAPES = {
    "3-D": lambda q, k, v: (q[0], k[0], v[0]),
    "batch": lambda q, k, v: (q[:1], k, v),
    "heads": lambda q, k, v: (q[:, :, :3], k, v),
    "heads of v": lambda q, k, v: (q, k, v[:, :, :1]),
    "length of v": lambda q, k, v: (q, k, v[:, :12]),
    "head_dim": lambda q, k, v: (q[..., :8], k, v),
    "no heads of k": lambda q, k, v: (q, k[:, :, :0], v[:, :, :0]),
    "heads before sequence": lambda q, k, v: (t.transpose(1, 2) for t in (q, k, v)),
}


@pytest.mark.parametrize("case", FLASH_BAD_SHAPES)
def test_flash_names_the_layout_in_shape_errors(case):
    q, k, v = FLASH_BAD_SHAPES[case](*flash_inputs("cpu"))
    with pytest.raises(RuntimeError, match=r"\(batch, seqlen_q, heads_q, head_dim\)") as error:
        flash_attn_func(q, k, v)
    assert str(tuple(q.shape)) in str(error.value)


def test_flash_without_heads():
    q, k, v = flash_inputs("cpu", heads=(0, 0))
    assert flash_attn_func(q, k, v).shape == (2, 9, 0, 16)


def plain_attention(query, key, value, visible, scale=None):
    """The definition, differentiable; rows that see no key give 0."""
    group = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(group, 1) for t in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores.masked_fill(~visible, -torch.inf)
    weights = scores.softmax(-1).masked_fill(~visible.any(-1, keepdim=True), 0)
    return weights @ value, scores.logsumexp(-1)


@pytest.mark.parametrize("lengths", [(9, 13), (13, 9), (9, 9)], ids=str)
@pytest.mark.parametrize("case", FLASH_OPTIONS)
def test_flash_gradients(device, case, lengths, nothing_said):
    """From our kernels, and on a GPU, which has none for float64, from torch with the mask that
    means the same."""
    options, meaning = FLASH_OPTIONS[case]
    inputs = flash_inputs(device, torch.float64, seqlen_q=lengths[0], seqlen_k=lengths[1])
    inputs = [t.requires_grad_() for t in inputs]
    with warns_once("torch.float64 on cuda") if device == "cuda" else silent():
        out, lse, _ = flash_attn_func(*inputs, return_attn_probs=True, **options)
    band = {"is_causal": False, "window_left": -1, "window_right": -1, "bottom_right": True}
    scale = meaning.get("scale")
    band |= {name: value for name, value in meaning.items() if name != "scale"}
    visible = visible_band(*lengths, device=device, **band)
    expected, expected_lse = plain_attention(*heads_first(*inputs), visible, scale)
    torch.testing.assert_close(out.transpose(1, 2), expected)
    torch.testing.assert_close(lse, expected_lse)
    assert not lse.requires_grad
    weight = torch.randn_like(out)
    ours = torch.autograd.grad(out, inputs, weight)
    # The masked softmax of the definition has NaN gradients in rows that see no key.
    rows = visible.any(-1)
    kept = [inputs[0][:, rows], *inputs[1:]]
    expected, _ = plain_attention(*heads_first(*kept), visible[rows], scale)
    theirs = torch.autograd.grad(expected.transpose(1, 2), inputs, weight[:, rows])
    torch.testing.assert_close(ours, theirs)


def test_flash_asks_torch_for_no_mask_on_a_square(monkeypatch, nothing_said):
    """Where torch has a causal kernel that means the same, a mask would cost O(N^2) memory."""
    asked = []

    def record(*tensors, **options):
        asked.append((options["attn_mask"] is None, options["is_causal"], options["enable_gqa"]))
        return torch_sdpa(*tensors, **options)

    monkeypatch.setattr(interface, "_torch_attention", record)
    with warns_once("a head_dim outside 1 to 256"):
        for seqlen_q, window_size, causal in (
            (13, (-1, -1), True),
            (9, (-1, -1), True),
            (13, (5, -1), True),
            (13, (-1, -1), False),
        ):
            tensors = flash_inputs("cpu", seqlen_q=seqlen_q, dim=264, heads=(2, 2))
            options = {"causal": causal, "window_size": window_size}
            out = flash_attn_func(*tensors, **options, return_attn_probs=True)[0]
            assert_close(
                out.transpose(1, 2),
                *heads_first(*tensors),
                is_causal=causal,
                window_left=window_size[0],
                bottom_right=True,
            )
        flash_attn_func(*flash_inputs("cpu", dim=264, heads=(4, 2)))
    assert asked == [
        (True, True, False),
        (False, False, False),
        (False, False, False),
        (True, False, False),
        (True, False, True),
    ]


def test_flash_rows_without_keys_are_zero_whatever_torch_gives(monkeypatch, nothing_said):
    """Some of its backends give the mean of the values there."""

    def shifted(*tensors, **options):
        return torch_sdpa(*tensors, **options) + 1

    monkeypatch.setattr(interface, "_torch_attention", shifted)
    with warns_once("a head_dim outside 1 to 256"):
        out = flash_attn_func(*flash_inputs("cpu", seqlen_q=13, seqlen_k=9, dim=264), causal=True)
    assert (out[:, :4] == 0).all() and (out[:, 4:] != 0).any(-1).all()


def test_flash_calls_for_torch(device, nothing_said):
    q, k, v = flash_inputs(device, dim=264)
    with warns_once("a head_dim outside 1 to 256"):
        out, lse, _ = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    four = heads_first(q, k, v)
    assert_close(out.transpose(1, 2), *four, is_causal=True, bottom_right=True)
    reference = attention_ref(*four, is_causal=True, bottom_right=True)
    assert lse.dtype == torch.float32
    torch.testing.assert_close(lse.double(), reference.lse, atol=1e-3, rtol=1e-5)


def test_flash_autocast(device):
    q, k, v = flash_inputs(device, torch.float32)
    with torch.autocast(device, torch.bfloat16):
        out = flash_attn_func(q, k, v)
    assert torch.equal(out, flash_attn_func(*(t.bfloat16() for t in (q, k, v))))


@pytest.mark.parametrize("window", [3, (1,), (None, None), (1.5, 0)], ids=str)
def test_flash_window_of_another_form(window):
    q = randn(1, 5, 2, 16)
    with pytest.raises(RuntimeError, match="window_size: must be two integers"):
        flash_attn_func(q, q, q, window_size=window)
