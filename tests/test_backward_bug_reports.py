"""Inputs that broke the backward of other attention libraries: one test for each report.

As tests/test_bug_reports.py, which has the reports about forward; the numbers are of the same list.
R53 is missing, as it is about packed sequences.
"""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from calls import silent, warns_once
from cases import DTYPES, HALF, Case, embed, qkv, randn
from reference import backward, check_gradients, close, forward
from test_bug_reports import only_cuda
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashattn_ext import scaled_dot_product_attention


def test_r03_lowest_number_in_leading_columns_and_whole_rows(device):
    """PT#109517: dense float mask, 441 queries and keys; NaN gradients in one backend. A
    row full of the lowest number is a mean, in backward too."""
    for dtype in DTYPES[device]:
        tensors = qkv((2, 2), (441, 441), 64, device=device, dtype=dtype)
        for mask_dtype in {dtype, torch.float32}:
            mask = torch.zeros(1, 1, 441, 441, dtype=mask_dtype, device=device)
            mask[..., :300] = torch.finfo(mask_dtype).min
            mask[:, :, 7:90] = torch.finfo(mask_dtype).min
            grad_out = torch.randn_like(tensors[0])
            gradients = check_gradients(*tensors, mask, grad_out=grad_out)
            assert all(g.isfinite().all() for g in gradients)
            # Such rows alone: every value gets the mean of their gradients of the output.
            grad_out[:, :, :7] = grad_out[:, :, 90:] = 0
            gradients = check_gradients(*tensors, mask, grad_out=grad_out)
            if mask_dtype != torch.float16:  # 65504 leaves the scores some digits
                mean = (grad_out.double() / 441).sum(2, keepdim=True).expand(tensors[2].shape)
                torch.testing.assert_close(gradients[2].double(), mean, rtol=2e-2, atol=1e-3)


def test_r56_one_key(device):
    """FA#334: batch, heads and lengths 1, head_dim 16, numbers of size 3: grad_query was NaN. One
    key has weight 1 whatever its score."""
    for dtype in DTYPES[device]:
        for seqlen_q, head_dim in ((1, 16), (3, 16), (1, 64), (70, 128)):
            tensors = qkv((1, 1), (seqlen_q, 1), head_dim, device=device, dtype=dtype)
            tensors = [3 * x for x in tensors]
            grad_out = 3 * torch.randn_like(tensors[0])
            gradients = check_gradients(*tensors, grad_out=grad_out)
            # 0 but for the digits of O, which is V without an error where the GEMM makes none.
            size = grad_out.double().norm() * tensors[2].double().norm() * 3
            for gradient in gradients[:2]:
                assert gradient.double().abs().max() <= 2 * torch.finfo(dtype).eps * size
            close(gradients[2], grad_out.sum(2, keepdim=True), dtype)


def test_r58_tail_keys_beside_cold_scores(device):
    """PT#196678, TRL#7181: 704 keys, head_dim 64, all logits about -120, any mask tensor: keys of
    the tail, filled with zeros, scored 0, and exp(0 - LSE) was inf."""
    for dtype in HALF:
        for mask in (None, "bool-b1qk", "own-b1qk", "f32-11qk"):
            for seqlens in ((704, 704), (65, 193), (193, 65)):
                case = Case(dtype, batch=1, heads=(1, 1), seqlens=seqlens, values="cold", mask=mask)
                *tensors, attn_mask = case.build(device)
                gradients = check_gradients(*tensors, attn_mask, case_id=case.id)
                assert all(g.isfinite().all() for g in gradients)
        # Without a mask and colder still: exp(300 * log2 e) overflows float32 in any base.
        query, key, value = qkv((2, 2), (70, 70), 64, device=device, dtype=dtype)
        key = -query.abs() * 10
        query = query.abs() * 10
        check_gradients(query, key, value)
        check_gradients(query, key, value, is_causal=True)


def test_r60_head_dims_between_the_instances(device, nothing_said):
    """FA#2552: head_dim 128 of query and key, 96 of value: grad_value was partly wrong. One
    head_dim for all is right; two are refused by the op, and the public function asks torch."""
    for head_dim in (96, 104, 120, 128, 136, 192):
        tensors = qkv((2, 1), (70, 150), head_dim, device=device, dtype=torch.bfloat16)
        check_gradients(*tensors, is_causal=True)
    query, key, value = qkv((2, 2), (70, 150), 128, device=device)
    value = value[..., :96]
    with pytest.raises(RuntimeError, match="value: shape must equal that of key"):
        forward(query, key, value)
    tensors = [t.clone().requires_grad_() for t in (query, key, value)]
    with warns_once("a head_dim of value"):
        out = scaled_dot_product_attention(*tensors)
    grad_out = torch.randn_like(out)
    out.backward(grad_out)
    doubles = [t.detach().double().requires_grad_() for t in tensors]
    with sdpa_kernel(SDPBackend.MATH):
        F.scaled_dot_product_attention(*doubles).backward(grad_out.double())
    for ours, expected in zip(tensors, doubles, strict=True):
        torch.testing.assert_close(ours.grad.double(), expected.grad, rtol=1e-2, atol=1e-2)


def test_r62_gradient_of_a_plain_sum(device):
    """FA#355, XF#282: the gradient of the output was one number for all, or transposed: wrong
    gradients, or refused."""
    for dtype in HALF:
        for head_dim in (64, 128, 40):
            tensors = qkv((4, 2), (70, 100), head_dim, device=device, dtype=dtype)
            leaves = [t.clone().requires_grad_() for t in tensors]
            out = scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
            out.sum().backward()
            expected = check_gradients(*tensors, grad_out=torch.ones_like(out), is_causal=True)
            for leaf, gradient in zip(leaves, expected, strict=True):
                close(leaf.grad, gradient, dtype)
            grad_out = randn(1, 70, 4, head_dim, device=device, dtype=dtype).transpose(1, 2)
            results = []
            for layout in (grad_out, grad_out.contiguous()):
                out = scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
                results.append(torch.autograd.grad(out, leaves, layout))
            for a, b in zip(*results, strict=True):
                close(a, b, dtype)


def test_r63_each_gradient_follows_its_own_tensor(device):
    """FA#818, PT#119500: (2, 16, 513, 64), key contiguous, value and the gradient of the output
    transposed: grad_value had the layout of key, and compiled code disagreed with eager."""
    heads = 16 if device == "cuda" else 2
    query, key, value = qkv((heads, heads), (513, 513), 64, device=device, batch=2)
    value = value.transpose(1, 2).contiguous().transpose(1, 2)
    grad_out = torch.randn_like(value)
    assert grad_out.stride() == value.stride() != key.stride()
    arguments = (grad_out, query, key, value, *forward(query, key, value))
    gradients = check_gradients(query, key, value, grad_out=grad_out)
    with FakeTensorMode() as mode:
        fakes = torch.ops.fa.backward(*(mode.from_tensor(t) for t in arguments))
    for gradient, fake, tensor in zip(gradients, fakes, (query, key, value), strict=True):
        assert gradient.stride() == fake.stride() == tensor.stride()


def test_r65_only_the_mask_requires_grad(device, nothing_said):
    """PT#148476: (1, 1, 64, 16) in float32, only the float mask requires grad: illegal access, as
    no LSE was saved. Our kernels have no gradient for a mask: the op says so, and the public
    function asks torch."""
    tensors = qkv((1, 1), (64, 64), 16, device=device, dtype=torch.float32)
    mask = randn(64, 64, device=device, dtype=torch.float32).requires_grad_()
    with pytest.raises(RuntimeError, match="attn_mask: must not require grad"):
        torch.ops.fa.forward(*tensors, mask)
    reason = "torch.float32 on cuda" if device == "cuda" else "a mask that requires grad"
    with warns_once(reason):
        out = scaled_dot_product_attention(*tensors, mask)
    grad_out = torch.randn_like(out)
    out.backward(grad_out)
    exact = mask.detach().double().requires_grad_()
    with sdpa_kernel(SDPBackend.MATH):
        F.scaled_dot_product_attention(*(t.double() for t in tensors), exact).backward(
            grad_out.double()
        )
    torch.testing.assert_close(mask.grad.double(), exact.grad, rtol=1e-4, atol=1e-5)


@only_cuda
@pytest.mark.full
def test_r66_mask_beyond_2_31_elements(device, free_gpu_memory):
    """PT#147585, PT#150054: backward with a mask, 3 heads, lengths from 46345 up: offsets into the
    mask left int32."""
    length = 53936
    free_gpu_memory(12 << 30)
    tensors = qkv((3, 3), (length, length), 128, device=device, dtype=torch.bfloat16)
    grad_out = torch.randn_like(tensors[0])
    # Blocks along the diagonal, each a problem of its own; the last ones lie beyond 2^31.
    size = 2048
    block = torch.arange(length, device=device) // size
    mask = block[:, None] == block[None, :]
    assert mask.numel() > 2**31
    out, lse = forward(*tensors, mask)
    gradients = backward(grad_out, *tensors, out, lse, mask)
    for start in (0, length // size * size - size, length // size * size):
        part = slice(start, min(start + size, length))
        expected = check_gradients(*(t[:, :, part] for t in tensors), grad_out=grad_out[:, :, part])
        for ours, other in zip(gradients, expected, strict=True):
            close(ours[:, :, part], other, torch.bfloat16)


def test_r68_inference_keeps_nothing_and_training_works(device):
    """FA#1383: without grad, all inputs and outputs were kept alive; the first fix read the grad
    mode inside of the autograd function, where it is off, and broke training."""
    query, key, value = qkv((2, 2), (9, 13), 16, device=device)
    kept = []

    def call(query, key, value):
        with saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            return scaled_dot_product_attention(query, key, value)

    out = call(query, key, value)
    assert not kept and out.grad_fn is None
    reference = weakref.ref(query)
    del query
    gc.collect()
    assert reference() is None
    query = randn(1, 2, 9, 16, device=device).requires_grad_()
    out = call(query, key, value)
    assert len(kept) == 5
    out.sum().backward()
    assert query.grad.abs().max() > 0


@only_cuda
@pytest.mark.full
def test_r71_many_heads_and_a_large_batch(device, free_gpu_memory):
    """FA#1311, FA#1500: bfloat16 [28800, 15, 16, 72] in training, about 1 GB a tensor, or a batch
    above 10 thousand: offsets into the padded fp32 gradient of query left int32."""
    batch, heads = 28800, 16
    free_gpu_memory(48 << 30)  # 15 or 30 of them for the fp32 gradient, in whole blocks of rows
    shape = (batch, 15, heads, 72)
    tensors = [
        torch.randn(shape, device=device, dtype=torch.bfloat16).transpose(1, 2) for _ in range(4)
    ]
    grad_out, *tensors = tensors
    out, lse = forward(*tensors)
    gradients = backward(grad_out, *tensors, out, lse)
    for b in (0, batch // 2, batch - 1):
        part = slice(b, b + 1)
        expected = check_gradients(*(t[part] for t in tensors), grad_out=grad_out[part])
        for ours, other in zip(gradients, expected, strict=True):
            close(ours[part], other, torch.bfloat16)


@only_cuda
def test_r83_right_behind_the_kernel_that_writes_grad_out(device):
    """FA#2481: the kernel before the backward one, launched to overlap with what writes the
    gradient of the output, read it too early now and then: grad_query and grad_key were wrong."""
    tensors = qkv((8, 8), (512, 512), 64, device=device, dtype=torch.bfloat16, batch=4)
    out, lse = forward(*tensors, is_causal=True)
    source = torch.randn_like(out)
    expected = backward(source, *tensors, out, lse, is_causal=True, deterministic=True)
    grad_out = torch.empty_like(out)
    for run in range(200):
        grad_out.fill_(torch.nan)
        torch.mul(source, 1, out=grad_out)
        gradients = torch.ops.fa.backward(
            grad_out, *tensors, out, lse, is_causal=True, deterministic=True
        )
        assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True)), run


@only_cuda
def test_r91_thirty_runs_with_the_deterministic_flag(device):
    """FA#2244: grad_query differed by up to 1.2e-4 between runs."""
    for head_dim, options in ((64, {}), (128, {"is_causal": True}), (256, {"scale": -0.1})):
        tensors = qkv((8, 2), (1024, 1024), head_dim, device=device, dtype=torch.bfloat16, batch=2)
        leaves = [t.requires_grad_() for t in tensors]
        grad_out = torch.randn_like(tensors[0])
        torch.use_deterministic_algorithms(True)
        try:
            with silent():
                out = forward(*leaves, **options)[0]
            first = torch.autograd.grad(out, leaves, grad_out, retain_graph=True)
            for run in range(30):
                again = torch.autograd.grad(out, leaves, grad_out, retain_graph=True)
                assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True)), run
        finally:
            torch.use_deterministic_algorithms(False)


def test_r63_overlapping_memory(device):
    """The strides of a gradient are those of empty_like, which does not overlap where the tensor
    does."""
    query, key, value = qkv((4, 4), (70, 70), 64, device=device)
    key = key[:, :1].expand(key.shape)
    value = embed(value.cpu(), order=(0, 2, 1, 3)).to(device)[:, :, :1].expand(value.shape)
    gradients = check_gradients(query, key, value)
    assert gradients[1].stride() == torch.empty_like(key).stride() != key.stride()
