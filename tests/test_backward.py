"""fa::backward against the reference over dtypes, shapes, masks, layouts and values; and what a
single comparison cannot show: that no argument is ignored, that what is hidden stays out, that
results repeat and memory is left alone."""

import dataclasses
import random

import pytest
import torch
import torch.nn.functional as F
from cases import (
    BANDS,
    CPU_DTYPES,
    DTYPES,
    EDGE,
    FULL_LENGTHS,
    HALF,
    LAYOUTS,
    SMOKE,
    Case,
    check_full,
    on_devices,
)
from reference import (
    assert_gradients_close,
    backward,
    check_gradients,
    close,
    forward,
    gradient_bounds,
    gradients_low,
    gradients_ref,
)


def check_case(case, device, **options):
    *tensors, mask = case.build(device)
    return check_gradients(*tensors, mask, case_id=f"{device}-{case.id}", **case.options, **options)


def on_each_device(cases, share):
    """Every case on a GPU, and this share of them on the CPU; the others there with --full."""
    chosen = set(random.Random(0).sample(range(len(cases)), round(share * len(cases))))
    return pytest.mark.parametrize(
        "device,case",
        [
            pytest.param(
                device,
                case,
                id=f"{device}-{case.id}",
                marks=() if device == "cuda" or i in chosen else pytest.mark.full,
            )
            for device in ("cpu", "cuda")
            for i, case in enumerate(cases)
        ],
        indirect=["device"],
    )


@on_each_device(SMOKE, 0.15)
def test_smoke(device, case):
    check_case(case, device)


@on_each_device(EDGE, 0.3)
def test_edge(device, case):
    check_case(case, device)


@on_devices(random.Random(0).sample(CPU_DTYPES, 60), devices=["cpu"])
def test_float32_and_float64(device, case):
    check_case(case, device)


@pytest.mark.full
@pytest.mark.parametrize("seqlen_q", FULL_LENGTHS)
def test_full(device, seqlen_q):
    check_full(check_case, device, seqlen_q)


# The lengths of the shortest and the longest rows of tiles, with every band. On a GPU the last one
# has many more key blocks than fit the SMs at once.
BANDED = [
    Case(dtype, batch=1, heads=(4, 2), seqlens=seqlens, head_dim=head_dim, **band)
    for (dtype, head_dim), seqlens in zip(
        ((torch.float16, 64), (torch.bfloat16, 128), (torch.float16, 256)),
        ((300, 300), (257, 400), (400, 257)),
        strict=True,
    )
    for band in BANDS
]


@on_each_device(BANDED, 0.3)
def test_bands(device, case):
    check_case(case, device)


@on_devices(
    [
        Case(torch.bfloat16, batch=2, heads=(8, 2), seqlens=(2048, 2048), head_dim=128),
        Case(torch.float16, batch=1, heads=(6, 6), seqlens=(3000, 4100), head_dim=64),
        Case(torch.bfloat16, batch=1, heads=(16, 8), seqlens=(4096, 4096), is_causal=True),
        Case(torch.float16, batch=1, heads=(2, 1), seqlens=(1500, 2500), mask="own-11qk"),
        Case(torch.float16, batch=1, heads=(8, 4), seqlens=(4096, 4096), head_dim=256),
        Case(
            torch.bfloat16,
            batch=1,
            heads=(8, 4),
            seqlens=(4096, 4096),
            head_dim=256,
            is_causal=True,
        ),
    ],
    devices=["cuda"],
)
def test_many_tiles(device, case):
    check_case(case, device)
    check_case(case, device, deterministic=True)


@on_devices(BANDED[::5], devices=["cuda"])
def test_deterministic(device, case):
    """The same gradients from the other order of additions, and the same bits every time."""
    check_case(case, device, deterministic=True)


# The yardstick itself


@pytest.mark.parametrize("mask", [None, "bool-b11k", "own-b1qk"])
def test_reference_is_torchs_math(mask):
    case = Case(torch.float64, heads=(4, 2), seqlens=(20, 37), mask=mask, scale=0.3)
    *tensors, attn_mask = case.build("cpu")
    tensors = [x.requires_grad_() for x in tensors]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        out = F.scaled_dot_product_attention(*tensors, attn_mask, scale=0.3, enable_gqa=True)
    grad_out = torch.randn_like(out)
    theirs = torch.autograd.grad(out, tensors, grad_out)
    tensors = [x.detach() for x in tensors]
    reference = gradients_ref(grad_out, *tensors, attn_mask, scale=0.3)
    for ours, expected in zip(reference.gradients, theirs, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
    # Plain code rounds on its way, and nothing else: in float64 it is the same.
    low = gradients_low(grad_out, *tensors, attn_mask, scale=0.3)
    for ours, expected in zip(low, theirs, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_comparison_sees_what_is_wrong(dtype):
    """One element of one gradient, all of one by 3 %, and a row sum that was left out."""
    case = Case(dtype, heads=(4, 2), seqlens=(130, 300))
    *tensors, _ = case.build("cpu")
    grad_out = torch.randn_like(tensors[0])
    reference = gradients_ref(grad_out, *tensors)
    low = gradients_low(grad_out, *tensors)
    right = [x.to(dtype) for x in reference.gradients]
    assert_gradients_close(right, reference, low, case.id)
    bounds, _ = gradient_bounds(reference, low, dtype)
    for i, name in enumerate(("query", "key", "value")):
        at = (1, 1, 77, 5)
        size = reference.gradients[i].abs().max()
        assert bounds[i][at] < 0.1 * size
        for wrong in (right[i][at] + 0.1 * size, torch.nan, torch.inf):
            broken = [x.clone() for x in right]
            broken[i][at] = wrong
            with pytest.raises(AssertionError, match=rf"grad_{name}\[1, 1, 77, 5\]"):
                assert_gradients_close(broken, reference, low, case.id)
        broken = [x.clone() for x in right]
        broken[i] *= 1.03
        with pytest.raises(AssertionError, match=f"grad_{name}"):
            assert_gradients_close(broken, reference, low, case.id)
    # dS = P dP: as if the output were 0.
    out, lse = forward(*tensors)
    broken = backward(grad_out, *tensors, torch.zeros_like(out), lse)
    with pytest.raises(AssertionError, match=r"grad_(query|key)"):
        assert_gradients_close(broken, reference, low, case.id)


# Every argument acts


FLAGS = {
    "is_causal": {"is_causal": True},
    "scale": {"scale": 0.5},
    "negative_scale": {"scale": -0.125},
    "window_left": {"window_left": 3},
    "window_right": {"window_right": 3},
    "causal_with_window_left": {"is_causal": True, "window_left": 3},
    "causal_with_bottom_right": {"is_causal": True, "bottom_right": True},
    "window_with_bottom_right": {"window_left": 3, "bottom_right": True},
}


@pytest.mark.parametrize("flag", FLAGS)
def test_flag_is_not_ignored(device, flag):
    """Leaving out any one option gives other gradients, by much more than any tolerance."""
    options = FLAGS[flag]
    *tensors, _ = Case(torch.float16, seqlens=(70, 100)).build(device)
    grad_out = torch.randn_like(tensors[0])
    gradients = check_gradients(*tensors, grad_out=grad_out, case_id=flag, **options)
    out, lse = forward(*tensors, **options)
    for name in options:
        without = {key: value for key, value in options.items() if key != name}
        others = backward(grad_out, *tensors, out, lse, **without)
        for ours, other in zip(gradients, others, strict=True):
            assert (ours.float() - other.float()).abs().max() > 0.05, name


@pytest.mark.parametrize("kind", ["bool", "own", "f32", "bias"])
def test_mask_is_not_ignored(device, kind):
    case = Case(torch.bfloat16, seqlens=(70, 100), mask=f"{kind}-bhqk", is_causal=True)
    *tensors, mask = case.build(device)
    grad_out = torch.randn_like(tensors[0])
    gradients = check_gradients(*tensors, mask, grad_out=grad_out, case_id=case.id, is_causal=True)
    out, lse = forward(*tensors, mask, is_causal=True)
    for others in (
        backward(grad_out, *tensors, out, lse, is_causal=True),
        backward(grad_out, *tensors, out, lse, mask),
    ):
        for ours, other in zip(gradients, others, strict=True):
            assert (ours.float() - other.float()).abs().max() > 0.05


# Gradient of the output, in any layout


GRAD_OUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "head_dim outside": lambda x: x.mT.contiguous().mT,
    "offset": lambda x: torch.cat([x.new_full((1,), torch.nan), x.reshape(-1)])[1:].view(x.shape),
    "gaps": lambda x: torch.stack([x, torch.full_like(x, torch.nan)], -1)[..., 0],
    "odd rows": lambda x: F.pad(x, (0, 1), value=torch.nan)[..., :-1],
    "padded rows": lambda x: F.pad(x, (0, 8), value=torch.nan)[..., :-8],
    "one number": lambda x: x[:1, :1, :1, :1].expand(x.shape),
    "one row": lambda x: x[:, :, :1].expand(x.shape),
    "one column": lambda x: x[..., :1].expand(x.shape),
    "one head": lambda x: x[:, :1].expand(x.shape),
}


@pytest.mark.parametrize("layout", GRAD_OUTS)
def test_layout_of_grad_out(device, layout):
    for head_dim, seqlen, options in ((64, 70, {"is_causal": True}), (40, 33, {"scale": -0.2})):
        case = Case(torch.float16, heads=(4, 2), seqlens=(seqlen, 100), head_dim=head_dim)
        *tensors, _ = case.build(device)
        grad_out = GRAD_OUTS[layout](torch.randn_like(tensors[0]))
        gradients = check_gradients(*tensors, grad_out=grad_out, case_id=layout, **options)
        out, lse = forward(*tensors, **options)
        plain = backward(grad_out.contiguous(), *tensors, out, lse, **options)
        for ours, expected in zip(gradients, plain, strict=True):
            close(ours, expected, torch.float16)


@pytest.mark.parametrize("head_dim", [64, 33])
def test_layout_of_out_and_lse(device, head_dim):
    """Not as forward returns them: only their values count."""
    case = Case(torch.float16, heads=(4, 2), seqlens=(70, 100), head_dim=head_dim)
    *tensors, _ = case.build(device)
    grad_out = torch.randn_like(tensors[0])
    out, lse = forward(*tensors)
    expected = backward(grad_out, *tensors, out, lse)
    moved = torch.stack([lse, torch.full_like(lse, torch.nan)], -1)[..., 0]
    for other in (out.mT.contiguous().mT, F.pad(out, (1, 2), value=torch.nan)[..., 1:-2]):
        for a, b in zip(backward(grad_out, *tensors, other, moved), expected, strict=True):
            close(a, b, torch.float16)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "same_tensor"])
def test_values_do_not_depend_on_layout(device, layout):
    case = Case(
        torch.float16, heads=(4, 2), seqlens=(90, 150), head_dim=64, layout=layout, is_causal=True
    )
    *tensors, _ = case.build(device)
    grad_out = torch.randn_like(tensors[0])
    options = {"grad_out": grad_out, "case_id": case.id, **case.options}
    gradients = check_gradients(*tensors, **options)
    plain = check_gradients(*(x.contiguous() for x in tensors), **options)
    for ours, expected in zip(gradients, plain, strict=True):
        close(ours, expected, torch.float16)


# What is hidden


@pytest.mark.parametrize("hide", ["bool", "own", "f32", "causal", "window"])
def test_rows_and_keys_without_a_partner_get_zero(device, hide):
    """Exactly 0, and where half types would round, not almost."""
    case = Case(torch.bfloat16, heads=(4, 2), seqlens=(150, 200), head_dim=64)
    *tensors, _ = case.build(device)
    visible = torch.ones(150, 200, dtype=torch.bool, device=device)
    mask, options = None, {}
    if hide == "causal":
        options = {"is_causal": True}
        visible = visible.tril()
    elif hide == "window":
        options = {"window_left": 0, "window_right": 0, "bottom_right": True}
        visible = visible.tril(50).triu(50)
    else:
        visible[5:40] = visible[100] = visible[149] = False
        visible[:, 64:130] = visible[:, 3] = visible[:, 199] = False
        mask = visible
        if hide != "bool":
            dtype = torch.float32 if hide == "f32" else torch.bfloat16
            mask = torch.zeros(150, 200, dtype=dtype, device=device)
            mask.masked_fill_(~visible, -torch.inf)
    gradients = check_gradients(*tensors, mask, case_id=hide, **options)
    rows, keys = visible.any(1), visible.any(0)
    assert not rows.all() or not keys.all()
    assert not gradients[0][:, :, ~rows].any()
    several = visible.sum(1) > 1  # with one key the weight is 1 whatever the query
    assert gradients[0][:, :, several].any(-1).all()
    for gradient in gradients[1:]:
        assert not gradient[:, :, ~keys].any()
    assert gradients[2][:, :, keys].any(-1).all()


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize("hide", ["bool", "own", "causal", "window"])
def test_hidden_numbers_stay_out_on_the_cpu(hide, poison):
    """Keys that no query sees and queries that see no key, of whatever they hold. Where a tile
    holds them beside others, a product on tensor cores computes 0 times them; the CPU does not.
    Values of hidden keys are left finite, as forward asks for."""
    for dtype in DTYPES["cpu"]:
        case = Case(dtype, heads=(4, 2), seqlens=(60, 90), head_dim=16)
        *tensors, _ = case.build("cpu")
        grad_out = torch.randn_like(tensors[0])
        visible = torch.ones(60, 90, dtype=torch.bool)
        mask, options = None, {}
        if hide == "causal":
            options = {"is_causal": True, "bottom_right": True}
            tensors[1], tensors[2] = (x[:, :, :40].clone() for x in tensors[1:])
            visible = visible[:, :40].tril(-20)
        elif hide == "window":
            options = {"window_left": 3, "window_right": 3}
            visible = visible.tril(3).triu(-3)
        else:
            visible[7:9] = visible[59] = False
            visible[:, 30:50] = visible[:, 2] = False
            mask = visible
            if hide == "own":
                mask = torch.zeros(60, 90, dtype=dtype).masked_fill(~visible, -torch.inf)
        expected = check_gradients(*tensors, mask, grad_out=grad_out, case_id=hide, **options)
        rows, keys = ~visible.any(1), ~visible.any(0)
        assert rows.any() or keys.any()
        out, lse = forward(*tensors, mask, **options)
        tensors[0][:, :, rows] = poison
        grad_out[:, :, rows] = poison
        tensors[1][:, :, keys] = poison
        assert torch.equal(forward(*tensors, mask, **options)[1], lse)
        ours = backward(grad_out, *tensors, out, lse, mask, **options)
        for a, b in zip(ours, expected, strict=True):
            close(a, b, dtype)


def test_nan_that_takes_part_shows(device):
    """In the gradients that it bears on, and in no other sequence or head."""
    for dtype in DTYPES[device]:
        for which in range(4):
            case = Case(dtype, heads=(2, 2), seqlens=(70, 70), is_causal=True)
            *tensors, _ = case.build(device)
            tensors.append(torch.randn_like(tensors[0]))
            tensors[which][0, 1, 30, 5] = torch.nan
            out, lse = forward(*tensors[:3], is_causal=True)
            gradients = backward(tensors[3], *tensors[:3], out, lse, is_causal=True)
            bad_rows = slice(30, 31) if which in (0, 3) else slice(30, None)
            for i, gradient in enumerate(gradients):
                if i == 2 and which == 2:
                    assert gradient.isfinite().all()  # dV does not depend on V
                    continue
                rows = bad_rows if i == 0 else slice(0, 31)
                bad = gradient[0, 1, rows]
                if which == 3 and i == 2:
                    bad = bad[:, 5]
                assert bad.isnan().all(), f"{dtype} {which} {i}"
                assert gradient[1].isfinite().all() and gradient[0, 0].isfinite().all()


# What one comparison cannot show


REPEATED = [
    Case(torch.bfloat16, heads=(4, 2), seqlens=(300, 300), head_dim=128, is_causal=True),
    Case(torch.float16, heads=(4, 2), seqlens=(129, 500), head_dim=64, mask="own-b1qk"),
    Case(torch.float16, batch=1, heads=(4, 1), seqlens=(400, 257), head_dim=256),
    Case(torch.bfloat16, heads=(2, 2), seqlens=(200, 190), head_dim=72, window=(50, 9)),
]


@on_devices(REPEATED)
def test_repeats_bit_by_bit(device, case):
    """With deterministic; on the CPU, and of key and value, without it too."""
    *tensors, mask = case.build(device)
    grad_out = torch.randn_like(tensors[0])
    out, lse = forward(*tensors, mask, **case.options)
    arguments = (grad_out, *tensors, out, lse, mask)
    first = backward(*arguments, deterministic=True, **case.options)
    assert first[0].any()
    for run in range(30 if device == "cuda" else 2):
        again = backward(*arguments, deterministic=True, **case.options)
        for a, b in zip(first, again, strict=True):
            assert torch.equal(a, b), f"run {run}"
    free = [backward(*arguments, **case.options) for _ in range(2)]
    for i in (0, 1, 2) if device == "cpu" else (1, 2):
        assert torch.equal(free[0][i], free[1][i])


@on_devices([dataclasses.replace(case, layout="surrounded_odd") for case in REPEATED])
def test_inputs_and_their_surroundings_stay_as_they_are(device, case):
    *tensors, mask = case.build(device)
    out, lse = forward(*tensors, mask, **case.options)
    grad_out = F.pad(torch.randn_like(out), (3, 3), value=torch.nan)[..., 3:-3]
    everything = [grad_out, *tensors, out, lse] + ([] if mask is None else [mask])
    memory = [
        torch.empty(0, dtype=torch.uint8).to(device).set_(x.untyped_storage()) for x in everything
    ]
    before = [bytes_of_one.clone() for bytes_of_one in memory]
    for deterministic in (False, True):
        torch.ops.fa.backward(*everything, deterministic=deterministic, **case.options)
    for now, then in zip(memory, before, strict=True):
        assert torch.equal(now, then)


def test_a_sequence_does_not_depend_on_its_neighbours(device):
    """Bit by bit: the work on a (batch, key head) pair is the same whatever runs beside it."""
    case = Case(torch.bfloat16, batch=5, heads=(6, 3), seqlens=(130, 190), is_causal=True)
    *tensors, _ = case.build(device)
    grad_out = torch.randn_like(tensors[0])
    options = {"is_causal": True, "deterministic": True}

    def gradients(grad_out, *tensors):
        out, lse = torch.ops.fa.forward(*tensors, is_causal=True)
        return torch.ops.fa.backward(grad_out, *tensors, out, lse, **options)

    together = gradients(grad_out, *tensors)
    for b in (0, 4):
        alone = [x[b : b + 1, -n:] for x, n in zip((grad_out, *tensors), (2, 2, 1, 1), strict=True)]
        for ours, expected, n in zip(gradients(*alone), together, (2, 1, 1), strict=True):
            assert torch.equal(ours[0], expected[b, -n:])


def test_number_of_threads_does_not_matter():
    """With at least as many key heads as threads bit by bit; fewer are taken apart another way."""
    case = Case(torch.float32, batch=3, heads=(2, 1), seqlens=(70, 300), is_causal=True)
    threads = torch.get_num_threads()
    *tensors, _ = case.build("cpu")
    grad_out = torch.randn_like(tensors[0])
    results = []
    try:
        for n in (1, 3, 4):
            torch.set_num_threads(n)
            results.append(check_gradients(*tensors, grad_out=grad_out, is_causal=True))
    finally:
        torch.set_num_threads(threads)
    for gradients, same in zip(results, (True, True, False), strict=True):
        for ours, expected in zip(gradients, results[0], strict=True):
            close(ours, expected, torch.float32)
            assert torch.equal(ours, expected) or not same


@pytest.mark.parametrize("device", ["cuda"], indirect=True)
@pytest.mark.parametrize("mask", [False, True])
def test_memory_on_the_gpu_is_linear(device, mask):
    """No scores and no expanded heads: the gradients, a copy of each tensor that is not laid out as
    the kernel reads or writes it, and one fp32 gradient of query with two numbers a row."""
    case = Case(batch=1, heads=(8, 1), seqlens=(4096, 4096), head_dim=128, layout="transposed")
    *tensors, _ = case.build(device)
    attn_mask = torch.ones(4096, 4096, dtype=torch.bool, device=device) if mask else None
    out, lse = torch.ops.fa.forward(*tensors, attn_mask, is_causal=True)
    grad_out = torch.randn_like(out)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.ops.fa.backward(grad_out, *tensors, out, lse, attn_mask, is_causal=True)
    peak = torch.cuda.max_memory_allocated() - before
    # Here the last stride is not 1: each of five tensors and three gradients has a second one.
    sizes = sum(2 * x.nbytes for x in (*tensors, out)) + 2 * out.nbytes
    sizes += sum(x.nbytes for x in tensors) + 2 * lse.nbytes
    sizes += attn_mask.numel() // 4 if mask else 0
    assert peak <= sizes + 2**21, f"{peak} bytes beyond the inputs, {sizes} expected"


def test_dtypes_of_each_backend(device):
    for dtype in DTYPES[device]:
        check_case(Case(dtype, seqlens=(33, 70)), device)
