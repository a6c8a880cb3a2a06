"""Which kernel a call takes: what `flashattn_ext.forward_kernel` says, and that it says it for a
reason that holds."""

import re

import pytest
import torch

import flashattn_ext

HOPPER = (
    torch.cuda.is_available()
    and torch.cuda.get_device_capability() == (9, 0)
    and flashattn_ext.build_info()["with_sm90a"]
)


def tensors(device, batch=2, heads=(4, 2), seqlens=(200, 300), head_dim=128, dtype=torch.float16):
    shapes = [(batch, heads[i > 0], seqlens[i > 0], head_dim) for i in range(3)]
    return [torch.randn(shape, device=device).to(dtype) for shape in shapes]


def test_names_kernel_tile_and_reason(device):
    text = flashattn_ext.forward_kernel(*tensors(device), is_causal=True)
    if device == "cpu":
        assert text == "cpu: query is on the CPU"
    else:
        assert re.fullmatch(r"fwd_sm(80|90) \d+x\d+: \S.*", text)
        assert text.startswith("fwd_sm90") == HOPPER


def test_refuses_what_the_operator_refuses(device):
    query, key, value = tensors(device)
    with pytest.raises(RuntimeError, match="value: shape must equal that of key"):
        flashattn_ext.forward_kernel(query, key, value[:, :, :-1])
    with pytest.raises(RuntimeError, match="query: dtype must be float16"):
        flashattn_ext.forward_kernel(query.int(), key.int(), value.int())


only_hopper = pytest.mark.skipif(not HOPPER, reason="no Hopper GPU, or built without sm_90a")


def unaligned(tensor):
    """The same values in rows that start 2 bytes off a 16-byte boundary."""
    wide = torch.zeros(*tensor.shape[:3], tensor.shape[3] + 8, dtype=tensor.dtype, device="cuda")
    return wide[..., 1 : tensor.shape[3] + 1].copy_(tensor)


@only_hopper
@pytest.mark.parametrize(
    ("change", "kernel", "reason"),
    [
        ({}, "fwd_sm90", "sm_90"),
        ({"window_left": 64}, "fwd_sm90", "sm_90"),
        ({"attn_mask": True}, "fwd_sm90", "sm_90"),
        ({"unaligned": True}, "fwd_sm90", "sm_90"),  # query is copied to aligned rows
        ({"head_dim": 40}, "fwd_sm90", "sm_90"),
        ({"head_dim": 200}, "fwd_sm90", "sm_90"),
        ({"head_dim": 100}, "fwd_sm80", "head_dim is no multiple of 8"),
        ({"scale": 0.0}, "fwd_sm80", "scale is not positive"),
        ({"scale": -1.0}, "fwd_sm80", "scale is not positive"),
    ],
)
def test_reasons_on_hopper(change, kernel, reason):
    change = dict(change)
    query, key, value = tensors("cuda", head_dim=change.pop("head_dim", 128))
    if change.pop("unaligned", False):
        key = unaligned(key)
    if "attn_mask" in change:
        change["attn_mask"] = torch.ones(200, 300, dtype=torch.bool, device="cuda")
    text = flashattn_ext.forward_kernel(query, key, value, **change)
    assert text.startswith(kernel) and reason in text


@pytest.mark.parametrize(
    ("heads", "seqlens", "options", "kernel"),
    [
        ((32, 8), (1, 4096), {}, "decode 16x"),
        ((4, 4), (1, 700), {"is_causal": True}, "decode 16x"),
        ((32, 8), (8, 4096), {"window_left": 512, "bottom_right": True}, "decode 32x"),
        ((32, 8), (16, 4096), {"scale": -1.0}, "decode (32|64)x"),
        ((32, 8), (16, 4096), {}, "decode(_sm90)? 64x"),
        ((8, 1), (256, 8192), {}, "decode(_sm90)? 128x"),
        ((256, 256), (48, 1024), {}, "fwd_sm"),  # tiles enough, and no group to read keys once for
        ((32, 8), (1024, 2048), {}, "fwd_sm"),
        ((32, 8), (1, 4096), {"attn_mask": torch.bool}, "decode 16x"),
        ((32, 8), (8, 4096), {"attn_mask": torch.bool}, "decode 32x"),
        ((32, 8), (9, 4096), {"attn_mask": torch.bool}, "fwd_sm"),
        ((32, 8), (1, 4096), {"attn_mask": torch.float32}, "fwd_sm"),
    ],
)
def test_few_queries(device, heads, seqlens, options, kernel):
    if device == "cpu":
        pytest.skip("the CPU has one kernel")
    query, key, value = tensors(device, 1, heads, seqlens)
    if "attn_mask" in options:
        options = {"attn_mask": torch.ones(seqlens, dtype=options["attn_mask"], device=device)}
    text = flashattn_ext.forward_kernel(query, key, value, **options)
    assert re.match(kernel, text), text


def test_small_tiles_where_every_multiprocessor_gets_several(device):
    if device == "cpu":
        pytest.skip("the CPU has one kernel")
    heads = 4 * torch.cuda.get_device_properties(0).multi_processor_count
    for heads_k, tile in ((heads, "16x64"), (heads // 4, "16x128" if HOPPER else "16x64")):
        text = flashattn_ext.forward_kernel(*tensors(device, 1, (2 * heads_k, heads_k), (1, 700)))
        assert text.startswith(f"decode {tile}, 1 split:"), text


def test_splits_are_those_of_the_visible_keys(device):
    """Keys outside of the band make no work for a split."""
    if device == "cpu":
        pytest.skip("the CPU has one kernel")
    query, key, value = tensors(device, 1, (32, 8), (1, 32768))

    def splits(**options):
        text = flashattn_ext.forward_kernel(query, key, value, **options)
        return int(re.search(r", (\d+) splits?\b", text).group(1))

    assert splits() > 4
    assert splits(is_causal=True) == 1  # the top-left corner: one key
    assert splits(window_left=100, bottom_right=True) <= 2


@only_hopper
def test_few_tiles_take_fewer_rows():
    """The last wave decides: 192-row tiles where there are many, 128 rows where there are few."""
    few = tensors("cuda", batch=1, heads=(8, 8), seqlens=(1024, 1024))
    many = tensors("cuda", batch=8, heads=(32, 8), seqlens=(2048, 2048))
    assert flashattn_ext.forward_kernel(*few, is_causal=True).startswith("fwd_sm90 128x")
    assert flashattn_ext.forward_kernel(*many, is_causal=True).startswith("fwd_sm90 192x")
