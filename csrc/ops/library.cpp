// The schemas of the operators. The implementations are registered by cpu.cpp, cpu_backward.cpp,
// cuda.cpp, cuda_backward.cpp and autograd.cpp, the fake kernels in Python.
#include <torch/library.h>

TORCH_LIBRARY(fa, m) {
  // Attention forward: out = softmax(scale * query @ key^T + mask) @ value and the natural
  // logarithm of the softmax denominators. Shapes: query and out [batch, heads_q, seqlen_q,
  // head_dim], key and value [batch, heads_k, seqlen_k, head_dim], attn_mask broadcast to [batch,
  // heads_q, seqlen_q, seqlen_k], lse [batch, heads_q, seqlen_q] in float32 (float64 for float64).
  // attn_mask: bool (true = take part) or additive. scale: 1 / sqrt(head_dim) by default. Query i
  // sees the keys from i - window_left to i + window_right, -1 meaning no limit; is_causal limits
  // window_right to 0; with bottom_right, i counts from seqlen_k - seqlen_q. A query that sees no
  // key gives out 0 and lse -inf. Differentiable with respect to query, key and value, once; lse
  // never requires grad, and attn_mask must not. deterministic: the gradients repeat bit by bit, as
  // out and lse do anyway; torch.use_deterministic_algorithms does the same.
  m.def(
      "forward(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, "
      "bool is_causal=False, float? scale=None, *, SymInt window_left=-1, "
      "SymInt window_right=-1, bool bottom_right=False, bool deterministic=False) -> "
      "(Tensor out, Tensor lse)",
      {at::Tag::pt2_compliant_tag, at::Tag::needs_exact_strides});
  // Which kernel forward takes for these arguments on this device, with its tile (query rows x keys
  // of a block), and why: "fwd_sm80 128x64: scale is not positive", "decode 16x128, 16 splits: few
  // queries". Launches nothing.
  m.def(
      "forward_kernel(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, "
      "bool is_causal=False, float? scale=None, *, SymInt window_left=-1, "
      "SymInt window_right=-1, bool bottom_right=False) -> str");
  // The gradients of out with respect to query, key and value, each laid out as its tensor: from
  // grad_out, shaped like out, from what forward was given and from what it returned. A query that
  // sees no key gets gradient 0, and so does a key that no query sees. deterministic: results
  // repeat bit by bit, at some cost of speed on CUDA. Not differentiable.
  m.def(
      "backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, "
      "Tensor? attn_mask=None, bool is_causal=False, float? scale=None, *, SymInt window_left=-1, "
      "SymInt window_right=-1, bool bottom_right=False, bool deterministic=False) -> "
      "(Tensor grad_query, Tensor grad_key, Tensor grad_value)",
      {at::Tag::pt2_compliant_tag, at::Tag::needs_exact_strides});
  // Which kernel backward takes, as forward_kernel.
  m.def(
      "backward_kernel(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, "
      "Tensor lse, Tensor? attn_mask=None, bool is_causal=False, float? scale=None, *, "
      "SymInt window_left=-1, SymInt window_right=-1, bool bottom_right=False, "
      "bool deterministic=False) -> str");
}
