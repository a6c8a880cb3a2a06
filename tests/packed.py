"""Packed sequences for the tests: made, run, and compared with the reference one by one."""

import torch
from cases import randn
from reference import (
    assert_close_to_reference,
    assert_gradients_close,
    attention_low,
    attention_ref,
    gradients_low,
    gradients_ref,
)

import flashattn_ext  # noqa: F401  registers the operators

forward_varlen = torch.ops.fa.forward_varlen.default
backward_varlen = torch.ops.fa.backward_varlen.default


def int32(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def starts(lengths, front=0):
    """Where each of some lengths begins, and where the last one ends."""
    return [front + sum(lengths[:i]) for i in range(len(lengths) + 1)]


def new_contiguous(total, heads, head_dim, **options):
    return randn(total, heads, head_dim, **options)


class Packed:
    """query, key, value and grad_out of sequences of the given (query, key) lengths.

    padding: rows before the first sequence and behind the last, full of NaN. used: how many keys
    of each sequence take part; the others are NaN. new(total, heads, head_dim, device=, dtype=)
    makes a tensor.
    """

    def __init__(
        self,
        device,
        lengths,
        heads=(2, 2),
        head_dim=64,
        dtype=torch.bfloat16,
        *,
        used=None,
        padding=(0, 0),
        new=new_contiguous,
    ):
        self.seqlens_q, self.seqlens_k = ([pair[i] for pair in lengths] for i in range(2))
        self.starts_q, self.starts_k = (
            starts(seqlens, padding[0]) for seqlens in (self.seqlens_q, self.seqlens_k)
        )
        self.used = self.seqlens_k if used is None else used
        self.cu_seqlens_q, self.cu_seqlens_k = (
            int32(x, device) for x in (self.starts_q, self.starts_k)
        )
        self.seqused_k = None if used is None else int32(used, device)
        total_q, total_k = (x[-1] + padding[1] for x in (self.starts_q, self.starts_k))
        options = {"device": device, "dtype": dtype}
        self.query, self.grad_out = (new(total_q, heads[0], head_dim, **options) for _ in range(2))
        self.key, self.value = (new(total_k, heads[1], head_dim, **options) for _ in range(2))
        for tensor in (self.query, self.grad_out):
            tensor[: padding[0]] = tensor[self.starts_q[-1] :] = torch.nan
        for tensor in (self.key, self.value):
            tensor[: padding[0]] = tensor[self.starts_k[-1] :] = torch.nan
            for begin, seqlen, used_k in zip(
                self.starts_k, self.seqlens_k, self.used, strict=False
            ):
                tensor[begin + used_k : begin + seqlen] = torch.nan

    def key_places(self):
        """Of each sequence: its first row, how many of its keys take part, the end of its rows."""
        return zip(self.starts_k[:-1], self.used, self.starts_k[1:], strict=True)

    @property
    def tensors(self):
        return self.query, self.key, self.value

    @property
    def arguments(self):
        return *self.tensors, self.cu_seqlens_q, self.cu_seqlens_k

    def forward(self, is_causal=False, scale=None, **options):
        """The op, with NaN in the memory that results are likely to get."""
        stale = [torch.full_like(self.query, torch.nan) for _ in range(2)]
        stale += [self.query.new_full((2**18,), torch.nan) for _ in range(4)]
        del stale
        return forward_varlen(
            *self.arguments, is_causal, scale, seqused_k=self.seqused_k, **options
        )

    def backward(self, out, lse, is_causal=False, scale=None, **options):
        stale = [torch.full_like(x, torch.nan) for x in self.tensors for _ in range(2)]
        stale += [self.query.new_full((2**18,), torch.nan) for _ in range(4)]
        del stale
        arguments = (*self.tensors, out, lse, self.cu_seqlens_q, self.cu_seqlens_k)
        return backward_varlen(
            self.grad_out, *arguments, is_causal, scale, seqused_k=self.seqused_k, **options
        )

    def queries(self, tensor, b):
        """Rows of sequence b in the layout of fa::forward."""
        begin, end = self.starts_q[b : b + 2]
        return tensor[begin:end].transpose(0, 1).unsqueeze(0)

    def keys(self, tensor, b):
        """Those that take part."""
        begin = self.starts_k[b]
        return tensor[begin : begin + self.used[b]].transpose(0, 1).unsqueeze(0)

    def check_forward(self, case_id="", **options):
        """Runs the op, compares with the reference, and returns out and lse."""
        out, lse = self.forward(**options)
        assert out.shape == self.query.shape and out.dtype == self.query.dtype
        assert out.stride() == torch.empty_like(self.query).stride()
        assert lse.shape == (self.query.shape[1], self.query.shape[0]) and lse.is_contiguous()
        # On the CPU: on a GPU, every comparison of every sequence would be waited for.
        query, key, value, host_out, host_lse = (x.cpu() for x in (*self.tensors, out, lse))
        for b, seqlens in enumerate(zip(self.seqlens_q, self.used, strict=True)):
            tensors = self.queries(query, b), self.keys(key, b), self.keys(value, b)
            begin, end = self.starts_q[b : b + 2]
            ours = self.queries(host_out, b), host_lse[:, begin:end].unsqueeze(0)
            reference = attention_ref(*tensors, bottom_right=True, **options)
            low = attention_low(*tensors, bottom_right=True, **options)
            case = f"{case_id} {options} sequence {b} of {seqlens}"
            assert_close_to_reference(*ours, reference, low, case)
        for padding in (slice(0, self.starts_q[0]), slice(self.starts_q[-1], None)):
            assert (host_out[padding] == 0).all(), case_id
            assert (host_lse[:, padding] == -torch.inf).all(), case_id
        return out, lse

    def check_gradients(self, out, lse, case_id="", *, deterministic=False, **options):
        gradients = self.backward(out, lse, deterministic=deterministic, **options)
        for tensor, gradient in zip(self.tensors, gradients, strict=True):
            assert gradient.shape == tensor.shape and gradient.dtype == tensor.dtype
            assert gradient.stride() == torch.empty_like(tensor).stride()
        query, key, value, grad_out = (x.cpu() for x in (*self.tensors, self.grad_out))
        host = [x.cpu() for x in gradients]
        for b, seqlens in enumerate(zip(self.seqlens_q, self.used, strict=True)):
            arguments = (
                self.queries(grad_out, b),
                self.queries(query, b),
                self.keys(key, b),
                self.keys(value, b),
            )
            ours = self.queries(host[0], b), self.keys(host[1], b), self.keys(host[2], b)
            reference = gradients_ref(*arguments, bottom_right=True, **options)
            low = gradients_low(*arguments, bottom_right=True, **options)
            case = f"{case_id} {options} sequence {b} of {seqlens}"
            assert_gradients_close(ours, reference, low, case)
        for gradient, begins in zip(host, (self.starts_q, *[self.starts_k] * 2), strict=True):
            assert (gradient[: begins[0]] == 0).all(), case_id
            assert (gradient[begins[-1] :] == 0).all(), case_id
        for gradient in host[1:]:
            for begin, used_k, end in self.key_places():
                assert (gradient[begin + used_k : end] == 0).all(), case_id
        return gradients

    def check(self, case_id="", *, deterministic=False, **options):
        """Both directions."""
        out, lse = self.check_forward(case_id, **options)
        return (
            out,
            lse,
            *self.check_gradients(out, lse, case_id, deterministic=deterministic, **options),
        )
