"""fa::forward against the reference over dtypes, shapes, masks, layouts and values; and what a
single comparison cannot show: repeatability, that no flag is ignored, that memory is left alone."""

import dataclasses
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.nn.functional as F
from cases import (
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
    assert_close_to_reference,
    attention_low,
    attention_ref,
    check,
    error_bound,
    forward,
)


def check_case(case, device):
    *tensors, mask = case.build(device)
    return check(*tensors, mask, case_id=f"{device}-{case.id}", **case.options)


@on_devices(SMOKE)
def test_smoke(device, case):
    check_case(case, device)


@on_devices(EDGE)
def test_edge(device, case):
    check_case(case, device)


@on_devices(CPU_DTYPES, devices=["cpu"])
def test_float32_and_float64(device, case):
    check_case(case, device)


@pytest.mark.full
@pytest.mark.parametrize("seqlen_q", FULL_LENGTHS)
def test_full(device, seqlen_q):
    check_full(check_case, device, seqlen_q)


# The yardstick itself


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("mask", [None, "bool-bhqk", "own-b1qk"])
def test_reference_is_torchs_math(is_causal, mask):
    case = Case(torch.float64, heads=(4, 2), seqlens=(20, 37), is_causal=is_causal, mask=mask)
    *tensors, attn_mask = case.build("cpu")
    ours = attention_ref(*tensors, attn_mask, **case.options)
    # torch takes a mask or is_causal, not both.
    if is_causal and attn_mask is not None:
        band = torch.ones(case.seqlens, dtype=torch.bool).tril()
        attn_mask = (
            attn_mask & band
            if attn_mask.dtype == torch.bool
            else attn_mask.masked_fill(~band, -torch.inf)
        )
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        theirs = F.scaled_dot_product_attention(
            *tensors, attn_mask, is_causal=is_causal and attn_mask is None, enable_gqa=True
        )
    torch.testing.assert_close(ours.out, theirs, rtol=1e-12, atol=1e-12)


def test_reference_band_by_brute_force():
    seqlen_q, seqlen_k, left, right = 6, 9, 2, 3
    query, key = torch.zeros(1, 1, seqlen_q, 1), torch.zeros(1, 1, seqlen_k, 1)
    for corner, bottom_right in ((0, False), (seqlen_k - seqlen_q, True)):
        for window, causal in (((left, right), False), ((left, right), True), ((-1, -1), True)):
            ref = attention_ref(
                query,
                key,
                key,
                is_causal=causal,
                window_left=window[0],
                window_right=window[1],
                bottom_right=bottom_right,
            )
            for i in range(seqlen_q):
                count = sum(
                    (window[0] < 0 or j >= i + corner - window[0])
                    and (window[1] < 0 or j <= i + corner + window[1])
                    and (not causal or j <= i + corner)
                    for j in range(seqlen_k)
                )
                # All scores are 0, so that LSE is the logarithm of the number of visible keys.
                assert round(float(ref.lse[0, 0, i].exp())) == count


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_comparison_sees_one_wrong_element(dtype):
    """An error of 1 % of one output, hidden in any norm, and a NaN in the place of a number."""
    case = Case(dtype, seqlens=(130, 300))
    *tensors, _ = case.build("cpu")
    reference, low = attention_ref(*tensors), attention_low(*tensors)
    out, lse = reference.out.to(dtype), reference.lse.float()
    assert_close_to_reference(out, lse, reference, low, case.id)
    at = (1, 1, 77, 5)
    assert error_bound(reference, low, dtype)[at] < 0.05
    for wrong in (out[at] + 0.05, torch.nan, torch.inf):
        broken = out.clone()
        broken[at] = wrong
        with pytest.raises(AssertionError, match=r"out\[1, 1, 77, 5\]"):
            assert_close_to_reference(broken, lse, reference, low, case.id)
    for wrong in (lse[1, 0, 3] + 0.01, -torch.inf):
        broken = lse.clone()
        broken[1, 0, 3] = wrong
        with pytest.raises(AssertionError, match=r"lse\[1, 0, 3\]"):
            assert_close_to_reference(out, broken, reference, low, case.id)


# Every flag acts


FLAGS = {
    "is_causal": {"is_causal": True},
    "scale": {"scale": 0.5},
    "negative_scale": {"scale": -0.125},
    "window_left": {"window_left": 3},
    "window_right": {"window_right": 3},
    "causal_with_window_left": {"is_causal": True, "window_left": 3},
    "causal_bounds_window_right": {"is_causal": True, "window_right": 3},
    "causal_with_bottom_right": {"is_causal": True, "bottom_right": True},
    "window_with_bottom_right": {"window_left": 3, "bottom_right": True},
}


@pytest.mark.parametrize("flag", FLAGS)
def test_flag_is_not_ignored(device, flag):
    """Leaving out any one option gives something else, by much more than any tolerance."""
    options = FLAGS[flag]
    *tensors, _ = Case(torch.float16, seqlens=(70, 100)).build(device)
    out, _ = check(*tensors, case_id=flag, **options)
    for name in options:
        if flag == "causal_bounds_window_right" and name == "window_right":
            continue  # is_causal alone decides there
        without = {key: value for key, value in options.items() if key != name}
        other, _ = forward(*tensors, **without)
        assert (out.float() - other.float()).abs().max() > 0.1, name


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kind", ["bool", "own", "f32", "bias", "lowest"])
def test_mask_is_not_ignored(device, kind, is_causal):
    case = Case(torch.bfloat16, seqlens=(70, 100), mask=f"{kind}-bhqk", is_causal=is_causal)
    *tensors, mask = case.build(device)
    out, _ = check(*tensors, mask, case_id=case.id, is_causal=is_causal)
    for other in (
        forward(*tensors, is_causal=is_causal)[0],
        forward(*tensors, mask, is_causal=not is_causal)[0],
    ):
        assert (out.float() - other.float()).abs().max() > 0.1


def test_mask_broadcasts_along_the_right_dimension(device):
    """With sizes all alike, a mask read with two strides swapped still has the right shape."""
    n = 16
    query, key, value = (torch.randn(n, n, n, 8, device=device).half() for _ in range(3))
    for dimension in range(4):
        shape = [1, 1, 1, 1]
        shape[dimension] = n
        # Every dimension but the last hides or shows whole rows.
        mask = (torch.arange(n, device=device) % 3 != 0).view(shape)
        _, lse = check(query, key, value, mask, case_id=f"dimension {dimension}")
        if dimension < 3:
            assert torch.equal(lse == -torch.inf, ~mask[..., 0].expand(n, n, n))


# What one comparison cannot show


REPEATED = [
    Case(torch.bfloat16, heads=(4, 2), seqlens=(300, 300), head_dim=128, is_causal=True),
    Case(torch.float16, heads=(4, 2), seqlens=(129, 500), head_dim=64, mask="own-b1qk"),
    Case(torch.float16, heads=(8, 1), seqlens=(65, 257), head_dim=256),
    Case(torch.bfloat16, heads=(2, 2), seqlens=(200, 190), head_dim=72, window=(50, 9)),
]


@on_devices(REPEATED)
def test_repeats_bit_by_bit(device, case):
    *tensors, mask = case.build(device)
    first = torch.ops.fa.forward(*tensors, mask, **case.options)
    for run in range(9):
        for a, b in zip(first, torch.ops.fa.forward(*tensors, mask, **case.options), strict=True):
            assert torch.equal(a, b), f"run {run}"


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "same_tensor"])
def test_values_do_not_depend_on_layout(device, layout):
    """Bit by bit on a GPU, where one kernel serves all layouts; to rounding on a CPU, where the
    matrix products of a library do not."""
    for head_dim in (64, 40):
        case = Case(
            torch.float16,
            heads=(4, 2),
            seqlens=(90, 150),
            head_dim=head_dim,
            layout=layout,
            is_causal=True,
        )
        *tensors, _ = case.build(device)
        out, lse = check(*tensors, case_id=case.id, **case.options)
        plain = [x.contiguous() for x in tensors]
        plain_out, plain_lse = check(*plain, case_id="contiguous", **case.options)
        if device == "cuda":
            assert torch.equal(out, plain_out) and torch.equal(lse, plain_lse), layout


@on_devices([dataclasses.replace(case, layout="surrounded_odd") for case in REPEATED])
def test_inputs_and_their_surroundings_stay_as_they_are(device, case):
    *tensors, mask = case.build(device)
    tensors += [] if mask is None else [mask]
    memory = [
        torch.empty(0, dtype=torch.uint8).to(device).set_(x.untyped_storage()) for x in tensors
    ]
    before = [bytes_of_one.clone() for bytes_of_one in memory]
    torch.ops.fa.forward(*tensors, **case.options)
    for now, then in zip(memory, before, strict=True):
        assert torch.equal(now, then)


def test_a_sequence_does_not_depend_on_its_neighbours(device):
    """Bit by bit: the work on a (batch, head) pair is the same whatever runs beside it."""
    case = Case(torch.bfloat16, batch=5, heads=(6, 3), seqlens=(130, 190), is_causal=True)
    *tensors, _ = case.build(device)
    out, lse = torch.ops.fa.forward(*tensors, is_causal=True)
    for b in (0, 4):
        alone = [x[b : b + 1, -n:] for x, n in zip(tensors, (2, 1, 1), strict=True)]
        out_alone, lse_alone = torch.ops.fa.forward(*alone, is_causal=True)
        assert torch.equal(out[b, -2:], out_alone[0])
        assert torch.equal(lse[b, -2:], lse_alone[0])


def test_number_of_threads_does_not_matter():
    case = Case(torch.float32, batch=3, heads=(4, 2), seqlens=(200, 300), is_causal=True)
    *tensors, _ = case.build("cpu")
    threads = torch.get_num_threads()
    results = []
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            results.append(check(*tensors, is_causal=True, case_id=f"{n} threads"))
    finally:
        torch.set_num_threads(threads)
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1])


@pytest.mark.parametrize("device", ["cuda"], indirect=True)
@pytest.mark.parametrize("mask", [False, True])
def test_memory_on_the_gpu_is_linear(device, mask):
    """No scores in memory and no expanded heads, only the results, at most one copy of each tensor,
    and a bit for each element of a mask."""
    case = Case(batch=1, heads=(8, 1), seqlens=(4096, 4096), head_dim=128, layout="transposed")
    *tensors, _ = case.build(device)
    attn_mask = torch.ones(4096, 4096, dtype=torch.bool, device=device) if mask else None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out, lse = torch.ops.fa.forward(*tensors, attn_mask, is_causal=True)
    peak = torch.cuda.max_memory_allocated() - before
    # Here the last stride is not 1: each of query, key, value and out is copied once.
    sizes = sum(x.numel() * x.element_size() for x in (*tensors, out, out, lse))
    sizes += attn_mask.numel() // 8 if mask else 0
    assert peak <= sizes + 2**20, f"{peak} bytes beyond the inputs"


# Through getrusage, which only sees the process as a whole.
LINEAR_MEMORY_ON_CPU = textwrap.dedent(
    """
    import resource
    import torch
    import flashattn_ext  # registers the operators

    def run(seqlen):
        query = torch.randn(1, 4, seqlen, 16)
        key = torch.randn(1, 1, seqlen, 16)
        mask = torch.ones(1, seqlen, dtype=torch.bool)
        out, lse = torch.ops.fa.forward(query, key, key, mask, is_causal=True)
        torch.ops.fa.backward(out, query, key, key, out, lse, mask, is_causal=True)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    print(-run(256) + run(4096))
    """
)


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB on Linux only")
def test_memory_on_the_cpu_is_linear(tmp_path):
    """Forward and backward. The scores of one head would take 64 MiB in float32; all tensors
    together take 8 MiB."""
    command = [sys.executable, "-c", LINEAR_MEMORY_ON_CPU]
    # From elsewhere, as `-c` looks for modules in the working directory first.
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    grown = int(result.stdout)
    assert grown < 32 * 2**20, f"{grown >> 20} MiB"


def test_dtypes_of_each_backend(device):
    """float16 and bfloat16 everywhere, float32 and float64 on the CPU; lse in float32 or better."""
    for dtype in DTYPES[device]:
        check_case(Case(dtype, seqlens=(33, 70)), device)
