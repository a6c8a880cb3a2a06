// What the dispatcher does above the kernels of fa::forward and fa::backward, and of their like for
// packed sequences: derivatives and autocast. A call that needs neither passes straight through;
// what needs a derivative that does not exist raises, here and not later.
#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <optional>
#include <tuple>
#include <utility>

#include "operators.h"

namespace fa {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

void check_no_tangent(const char* op, const char* name, const at::Tensor& tensor) {
  TORCH_CHECK(!tensor._fw_grad(/*level=*/0).defined(), name, ": ", op,
              " has no forward-mode derivative, got a dual tensor; use "
              "torch.nn.functional.scaled_dot_product_attention under "
              "torch.nn.attention.sdpa_kernel(SDPBackend.MATH)");
}

bool requires_grad(const std::optional<at::Tensor>& tensor) {
  return tensor.has_value() && tensor->requires_grad();
}

// The derivative of fa::forward with respect to query, key and value. lse comes back through an
// argument: it is no differentiable output, and compiled autograd knows no mark for one.
struct ForwardNode : torch::autograd::Function<ForwardNode> {
  static constexpr bool is_traceable = true;  // all that backward reads is saved below

  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& query, const at::Tensor& key,
                            const at::Tensor& value, const std::optional<at::Tensor>& attn_mask,
                            bool is_causal, std::optional<double> scale,
                            const c10::SymInt& window_left, const c10::SymInt& window_right,
                            bool bottom_right, bool deterministic, at::Tensor* lse) {
    const at::AutoDispatchBelowADInplaceOrView below;
    at::Tensor out;
    std::tie(out, *lse) = forward_op().call(query, key, value, attn_mask, is_causal, scale,
                                            window_left, window_right, bottom_right, deterministic);
    ctx->save_for_backward({query, key, value, attn_mask.value_or(at::Tensor()), out, *lse});
    ctx->saved_data["is_causal"] = is_causal;
    ctx->saved_data["scale"] = scale;
    ctx->saved_data["window_left"] = window_left;
    ctx->saved_data["window_right"] = window_right;
    ctx->saved_data["bottom_right"] = bottom_right;
    ctx->saved_data["deterministic"] = deterministic;
    ctx->set_materialize_grads(false);
    return out;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    variable_list result(11);  // one for each argument of forward
    if (!grads[0].defined()) return result;
    const variable_list saved = ctx->get_saved_variables();
    const std::optional<at::Tensor> attn_mask =
        saved[3].defined() ? std::optional(saved[3]) : std::nullopt;
    auto [grad_query, grad_key, grad_value] = backward_op().call(
        grads[0], saved[0], saved[1], saved[2], saved[4], saved[5], attn_mask,
        ctx->saved_data["is_causal"].toBool(), ctx->saved_data["scale"].toOptional<double>(),
        ctx->saved_data["window_left"].toSymInt(), ctx->saved_data["window_right"].toSymInt(),
        ctx->saved_data["bottom_right"].toBool(),
        ctx->saved_data["deterministic"].toBool() || at::globalContext().deterministicAlgorithms());
    if (ctx->needs_input_grad(0)) result[0] = std::move(grad_query);
    if (ctx->needs_input_grad(1)) result[1] = std::move(grad_key);
    if (ctx->needs_input_grad(2)) result[2] = std::move(grad_value);
    return result;
  }
};

Outputs forward_autograd(c10::DispatchKeySet keys, const at::Tensor& query, const at::Tensor& key,
                         const at::Tensor& value, const std::optional<at::Tensor>& attn_mask,
                         bool is_causal, std::optional<double> scale, c10::SymInt window_left,
                         c10::SymInt window_right, bool bottom_right, bool deterministic) {
  check_no_tangent("fa::forward", "query", query);
  check_no_tangent("fa::forward", "key", key);
  check_no_tangent("fa::forward", "value", value);
  if (attn_mask.has_value()) check_no_tangent("fa::forward", "attn_mask", *attn_mask);
  if (c10::GradMode::is_enabled()) {
    TORCH_CHECK(!requires_grad(attn_mask),
                "attn_mask: must not require grad, as fa::forward has no derivative for it, got "
                "requires_grad=True; detach it, or use "
                "flashattn_ext.scaled_dot_product_attention, which leaves such calls to torch");
    if (query.requires_grad() || key.requires_grad() || value.requires_grad()) {
      at::Tensor lse;
      at::Tensor out =
          ForwardNode::apply(query, key, value, attn_mask, is_causal, scale, window_left,
                             window_right, bottom_right, deterministic, &lse);
      return {std::move(out), std::move(lse)};
    }
  }
  const at::AutoDispatchBelowADInplaceOrView below;
  return forward_op().redispatch(keys & c10::after_ADInplaceOrView_keyset, query, key, value,
                                 attn_mask, is_causal, scale, std::move(window_left),
                                 std::move(window_right), bottom_right, deterministic);
}

void refuse_second_derivative(const char* op) {
  TORCH_CHECK(false, op,
              ": its results have no derivative (gradients of gradients are not implemented); use "
              "torch.nn.functional.scaled_dot_product_attention under "
              "torch.nn.attention.sdpa_kernel(SDPBackend.MATH)");
}

// Gradients that raise when they are differentiated.
struct BackwardNode : torch::autograd::Function<BackwardNode> {
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext*, const at::Tensor& grad_out,
                               const at::Tensor& query, const at::Tensor& key,
                               const at::Tensor& value, const at::Tensor& out,
                               const at::Tensor& lse, const std::optional<at::Tensor>& attn_mask,
                               bool is_causal, std::optional<double> scale,
                               const c10::SymInt& window_left, const c10::SymInt& window_right,
                               bool bottom_right, bool deterministic) {
    const at::AutoDispatchBelowADInplaceOrView below;
    auto [grad_query, grad_key, grad_value] =
        backward_op().call(grad_out, query, key, value, out, lse, attn_mask, is_causal, scale,
                           window_left, window_right, bottom_right, deterministic);
    return {grad_query, grad_key, grad_value};
  }

  static variable_list backward(AutogradContext*, const variable_list&) {
    refuse_second_derivative("fa::backward");
    return {};
  }
};

Gradients backward_autograd(c10::DispatchKeySet keys, const at::Tensor& grad_out,
                            const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                            const at::Tensor& out, const at::Tensor& lse,
                            const std::optional<at::Tensor>& attn_mask, bool is_causal,
                            std::optional<double> scale, c10::SymInt window_left,
                            c10::SymInt window_right, bool bottom_right, bool deterministic) {
  const std::pair<const char*, const at::Tensor&> tensors[] = {
      {"grad_out", grad_out}, {"query", query}, {"key", key},
      {"value", value},       {"out", out},     {"lse", lse}};
  bool differentiable = requires_grad(attn_mask);
  for (const auto& [name, tensor] : tensors) {
    check_no_tangent("fa::backward", name, tensor);
    differentiable = differentiable || tensor.requires_grad();
  }
  if (attn_mask.has_value()) check_no_tangent("fa::backward", "attn_mask", *attn_mask);
  if (differentiable && c10::GradMode::is_enabled()) {
    variable_list gradients =
        BackwardNode::apply(grad_out, query, key, value, out, lse, attn_mask, is_causal, scale,
                            window_left, window_right, bottom_right, deterministic);
    return {gradients[0], gradients[1], gradients[2]};
  }
  const at::AutoDispatchBelowADInplaceOrView below;
  return backward_op().redispatch(keys & c10::after_ADInplaceOrView_keyset, grad_out, query, key,
                                  value, out, lse, attn_mask, is_causal, scale,
                                  std::move(window_left), std::move(window_right), bottom_right,
                                  deterministic);
}

// ---- Packed sequences

struct ForwardVarlenNode : torch::autograd::Function<ForwardVarlenNode> {
  static constexpr bool is_traceable = true;

  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& query, const at::Tensor& key,
                            const at::Tensor& value, const at::Tensor& cu_seqlens_q,
                            const at::Tensor& cu_seqlens_k, bool is_causal,
                            std::optional<double> scale, const c10::SymInt& window_left,
                            const c10::SymInt& window_right,
                            const std::optional<at::Tensor>& seqused_k, bool deterministic,
                            at::Tensor* lse) {
    const at::AutoDispatchBelowADInplaceOrView below;
    at::Tensor out;
    std::tie(out, *lse) =
        forward_varlen_op().call(query, key, value, cu_seqlens_q, cu_seqlens_k, is_causal, scale,
                                 window_left, window_right, seqused_k, deterministic);
    ctx->save_for_backward({query, key, value, cu_seqlens_q, cu_seqlens_k,
                            seqused_k.value_or(at::Tensor()), out, *lse});
    ctx->saved_data["is_causal"] = is_causal;
    ctx->saved_data["scale"] = scale;
    ctx->saved_data["window_left"] = window_left;
    ctx->saved_data["window_right"] = window_right;
    ctx->saved_data["deterministic"] = deterministic;
    ctx->set_materialize_grads(false);
    return out;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    variable_list result(12);  // one for each argument of forward
    if (!grads[0].defined()) return result;
    const variable_list saved = ctx->get_saved_variables();
    const std::optional<at::Tensor> seqused_k =
        saved[5].defined() ? std::optional(saved[5]) : std::nullopt;
    auto [grad_query, grad_key, grad_value] = backward_varlen_op().call(
        grads[0], saved[0], saved[1], saved[2], saved[6], saved[7], saved[3], saved[4],
        ctx->saved_data["is_causal"].toBool(), ctx->saved_data["scale"].toOptional<double>(),
        ctx->saved_data["window_left"].toSymInt(), ctx->saved_data["window_right"].toSymInt(),
        seqused_k,
        ctx->saved_data["deterministic"].toBool() || at::globalContext().deterministicAlgorithms());
    if (ctx->needs_input_grad(0)) result[0] = std::move(grad_query);
    if (ctx->needs_input_grad(1)) result[1] = std::move(grad_key);
    if (ctx->needs_input_grad(2)) result[2] = std::move(grad_value);
    return result;
  }
};

Outputs forward_varlen_autograd(c10::DispatchKeySet keys, const at::Tensor& query,
                                const at::Tensor& key, const at::Tensor& value,
                                const at::Tensor& cu_seqlens_q, const at::Tensor& cu_seqlens_k,
                                bool is_causal, std::optional<double> scale,
                                c10::SymInt window_left, c10::SymInt window_right,
                                const std::optional<at::Tensor>& seqused_k, bool deterministic) {
  check_no_tangent("fa::forward_varlen", "query", query);
  check_no_tangent("fa::forward_varlen", "key", key);
  check_no_tangent("fa::forward_varlen", "value", value);
  const bool differentiable = query.requires_grad() || key.requires_grad() || value.requires_grad();
  if (differentiable && c10::GradMode::is_enabled()) {
    at::Tensor lse;
    at::Tensor out =
        ForwardVarlenNode::apply(query, key, value, cu_seqlens_q, cu_seqlens_k, is_causal, scale,
                                 window_left, window_right, seqused_k, deterministic, &lse);
    return {std::move(out), std::move(lse)};
  }
  const at::AutoDispatchBelowADInplaceOrView below;
  return forward_varlen_op().redispatch(
      keys & c10::after_ADInplaceOrView_keyset, query, key, value, cu_seqlens_q, cu_seqlens_k,
      is_causal, scale, std::move(window_left), std::move(window_right), seqused_k, deterministic);
}

struct BackwardVarlenNode : torch::autograd::Function<BackwardVarlenNode> {
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext*, const at::Tensor& grad_out,
                               const at::Tensor& query, const at::Tensor& key,
                               const at::Tensor& value, const at::Tensor& out,
                               const at::Tensor& lse, const at::Tensor& cu_seqlens_q,
                               const at::Tensor& cu_seqlens_k, bool is_causal,
                               std::optional<double> scale, const c10::SymInt& window_left,
                               const c10::SymInt& window_right,
                               const std::optional<at::Tensor>& seqused_k, bool deterministic) {
    const at::AutoDispatchBelowADInplaceOrView below;
    auto [grad_query, grad_key, grad_value] = backward_varlen_op().call(
        grad_out, query, key, value, out, lse, cu_seqlens_q, cu_seqlens_k, is_causal, scale,
        window_left, window_right, seqused_k, deterministic);
    return {grad_query, grad_key, grad_value};
  }

  static variable_list backward(AutogradContext*, const variable_list&) {
    refuse_second_derivative("fa::backward_varlen");
    return {};
  }
};

Gradients backward_varlen_autograd(c10::DispatchKeySet keys, const at::Tensor& grad_out,
                                   const at::Tensor& query, const at::Tensor& key,
                                   const at::Tensor& value, const at::Tensor& out,
                                   const at::Tensor& lse, const at::Tensor& cu_seqlens_q,
                                   const at::Tensor& cu_seqlens_k, bool is_causal,
                                   std::optional<double> scale, c10::SymInt window_left,
                                   c10::SymInt window_right,
                                   const std::optional<at::Tensor>& seqused_k, bool deterministic) {
  const std::pair<const char*, const at::Tensor&> tensors[] = {
      {"grad_out", grad_out}, {"query", query}, {"key", key},
      {"value", value},       {"out", out},     {"lse", lse}};
  bool differentiable = false;
  for (const auto& [name, tensor] : tensors) {
    check_no_tangent("fa::backward_varlen", name, tensor);
    differentiable = differentiable || tensor.requires_grad();
  }
  if (differentiable && c10::GradMode::is_enabled()) {
    variable_list gradients = BackwardVarlenNode::apply(
        grad_out, query, key, value, out, lse, cu_seqlens_q, cu_seqlens_k, is_causal, scale,
        window_left, window_right, seqused_k, deterministic);
    return {gradients[0], gradients[1], gradients[2]};
  }
  const at::AutoDispatchBelowADInplaceOrView below;
  return backward_varlen_op().redispatch(keys & c10::after_ADInplaceOrView_keyset, grad_out, query,
                                         key, value, out, lse, cu_seqlens_q, cu_seqlens_k,
                                         is_causal, scale, std::move(window_left),
                                         std::move(window_right), seqused_k, deterministic);
}

// ---- Autocast

// Casts query, key and value to the dtype of autocast, as torch does for its own attention: not
// float64. A float32 mask stays as it is, which every kernel takes and which keeps its digits; one
// of another floating-point type follows query.
template <c10::DeviceType kDevice, c10::DispatchKey kKey>
Outputs forward_autocast(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                         const std::optional<at::Tensor>& attn_mask, bool is_causal,
                         std::optional<double> scale, c10::SymInt window_left,
                         c10::SymInt window_right, bool bottom_right, bool deterministic) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(kKey);
  const at::ScalarType dtype = at::autocast::get_autocast_dtype(kDevice);
  const auto cast = [&](const at::Tensor& tensor) {
    return at::autocast::cached_cast(dtype, tensor, kDevice);
  };
  std::optional<at::Tensor> mask = attn_mask;
  if (mask.has_value() && mask->scalar_type() != at::kFloat) mask = cast(*mask);
  return forward_op().call(cast(query), cast(key), cast(value), mask, is_causal, scale,
                           std::move(window_left), std::move(window_right), bottom_right,
                           deterministic);
}

template <c10::DeviceType kDevice, c10::DispatchKey kKey>
Outputs forward_varlen_autocast(const at::Tensor& query, const at::Tensor& key,
                                const at::Tensor& value, const at::Tensor& cu_seqlens_q,
                                const at::Tensor& cu_seqlens_k, bool is_causal,
                                std::optional<double> scale, c10::SymInt window_left,
                                c10::SymInt window_right,
                                const std::optional<at::Tensor>& seqused_k, bool deterministic) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(kKey);
  const at::ScalarType dtype = at::autocast::get_autocast_dtype(kDevice);
  const auto cast = [&](const at::Tensor& tensor) {
    return at::autocast::cached_cast(dtype, tensor, kDevice);
  };
  return forward_varlen_op().call(cast(query), cast(key), cast(value), cu_seqlens_q, cu_seqlens_k,
                                  is_causal, scale, std::move(window_left), std::move(window_right),
                                  seqused_k, deterministic);
}

}  // namespace
}  // namespace fa

TORCH_LIBRARY_IMPL(fa, Autograd, m) {
  m.impl("forward", TORCH_FN(fa::forward_autograd));
  m.impl("backward", TORCH_FN(fa::backward_autograd));
  m.impl("forward_varlen", TORCH_FN(fa::forward_varlen_autograd));
  m.impl("backward_varlen", TORCH_FN(fa::backward_varlen_autograd));
}

TORCH_LIBRARY_IMPL(fa, AutocastCPU, m) {
  m.impl("forward",
         TORCH_FN((fa::forward_autocast<c10::DeviceType::CPU, c10::DispatchKey::AutocastCPU>)));
  m.impl(
      "forward_varlen",
      TORCH_FN((fa::forward_varlen_autocast<c10::DeviceType::CPU, c10::DispatchKey::AutocastCPU>)));
}

TORCH_LIBRARY_IMPL(fa, AutocastCUDA, m) {
  m.impl("forward",
         TORCH_FN((fa::forward_autocast<c10::DeviceType::CUDA, c10::DispatchKey::Autocast>)));
  m.impl(
      "forward_varlen",
      TORCH_FN((fa::forward_varlen_autocast<c10::DeviceType::CUDA, c10::DispatchKey::Autocast>)));
}
