// Our kernels behind torch's own fused attention operators: for as long as an object of class
// Override lives, the operators that it was made for run fa::forward and fa::backward on one
// dispatch key.
//
//   F.scaled_dot_product_attention ─► aten::_scaled_dot_product_*  ─► takes(call)? ─► fa::forward
//                                     (autograd, tracing, DTensor:      │ no
//                                      torch's own)                     └─► the kernel of torch's
//                                                                           that stood here before
//
// Owns the translation between those operators and ours, and the question which calls ours take:
// takes(), which the forward and the backward of a call ask with the same arguments. Layouts of
// results are those of torch's meta functions, since compiled code relies on them.
#include <ATen/Context.h>
#include <ATen/core/boxing/impl/boxing.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/div.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ne.h>
#include <ATen/record_function.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "operators.h"

#if FA_WITH_CUDA
#include <ATen/cuda/CUDAContext.h>
#endif

namespace fa {
namespace {

using at::Tensor;
using c10::SymInt;
using OptionalTensor = std::optional<Tensor>;
using Scale = std::optional<double>;

// A kernel of torch's that one of ours stands before.
class Stock {
 public:
  Stock(const char* name, c10::DispatchKey key) : kernel_(find(name, key)), keys_(key) {}

  // Calls it past the dispatcher, which would come back to ours.
  template <typename Result, typename... Args>
  Result call(const Args&... args) const {
    torch::jit::Stack stack;
    torch::jit::push(stack, args...);
    call_boxed(&stack);
    return c10::impl::PopResult<Result>::call(stack);
  }

  void call_boxed(torch::jit::Stack* stack) const {
    kernel_.callBoxed(kernel_.opHandle(), keys_, stack);
  }

  c10::DispatchKeySet keys() const { return keys_; }

 private:
  static c10::SafeKernelFunction find(const char* name, c10::DispatchKey key) {
    const std::string full = std::string("aten::") + name;
    const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(full.c_str(), "");
    TORCH_CHECK(op.hasComputedKernelForDispatchKey(key), "operators: ", full,
                " must have a kernel for ", key, " that calls can fall back to, got none");
    return op.getComputedKernelForDispatchKey(key);
  }

  c10::SafeKernelFunction kernel_;
  c10::DispatchKeySet keys_;
};

// ------------------------------------------------------------------------------------------------
// Which calls our kernels take

bool has_dtype_and_device(const Tensor& query) {
  const at::ScalarType dtype = query.scalar_type();
  const bool half = dtype == at::kHalf || dtype == at::kBFloat16;
  if (query.is_cpu()) return half || dtype == at::kFloat || dtype == at::kDouble;
#if FA_WITH_CUDA
  return half && query.is_cuda() &&
         at::cuda::getDeviceProperties(query.device().index())->major >= 8;
#else
  return false;
#endif
}

bool is_like(const Tensor& tensor, const Tensor& query) {
  return tensor.dim() == query.dim() && tensor.scalar_type() == query.scalar_type() &&
         tensor.device() == query.device() && tensor.size(-1) == query.size(-1);
}

// What dense and packed calls have in common. heads: the dimension of the heads.
bool takes_tensors(const Tensor& query, const Tensor& key, const Tensor& value, int64_t heads,
                   double dropout_p) {
  return dropout_p == 0.0 && has_dtype_and_device(query) && is_like(key, query) &&
         is_like(value, query) && value.sizes() == key.sizes() && query.size(-1) >= 1 &&
         query.size(-1) <= 256 && key.size(heads) > 0 && query.size(heads) % key.size(heads) == 0;
}

bool are_4d(const Tensor& query, const Tensor& key, const Tensor& value) {
  return query.dim() == 4 && key.dim() == 4 && value.dim() == 4;
}

// (batch, heads, seqlen, head_dim).
bool takes(const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& mask,
           double dropout_p) {
  if (!are_4d(query, key, value) || !takes_tensors(query, key, value, 1, dropout_p)) return false;
  if (query.size(0) != key.size(0)) return false;
  if (!mask.has_value() || !mask->defined()) return true;
  const at::ScalarType dtype = mask->scalar_type();
  return !mask->requires_grad() && mask->device() == query.device() &&
         (dtype == at::kBool || dtype == at::kFloat || dtype == query.scalar_type());
}

// ------------------------------------------------------------------------------------------------
// Calls of our operators: below autograd and autocast, as the operators of torch that lead here

enum class Corner { kTopLeft, kBottomRight };

struct Band {
  bool is_causal;
  Corner corner;
  int64_t window_left = -1;
  int64_t window_right = -1;
};

Outputs forward(c10::DispatchKeySet keys, const Tensor& query, const Tensor& key,
                const Tensor& value, const OptionalTensor& mask, const Band& band, Scale scale) {
  RECORD_FUNCTION("fa::forward", c10::ArrayRef<const c10::IValue>{});
  return forward_op().redispatch(keys, query, key, value, mask, band.is_causal, scale,
                                 band.window_left, band.window_right,
                                 band.corner == Corner::kBottomRight, /*deterministic=*/false);
}

Gradients backward(c10::DispatchKeySet keys, const Tensor& grad_out, const Tensor& query,
                   const Tensor& key, const Tensor& value, const Tensor& out, const Tensor& lse,
                   const OptionalTensor& mask, const Band& band, Scale scale) {
  RECORD_FUNCTION("fa::backward", c10::ArrayRef<const c10::IValue>{});
  return backward_op().redispatch(keys, grad_out, query, key, value, out, lse, mask, band.is_causal,
                                  scale, band.window_left, band.window_right,
                                  band.corner == Corner::kBottomRight,
                                  at::globalContext().deterministicAlgorithms());
}

// Nobody reads the state of the random numbers of a call without dropout, but compiled code wants a
// tensor of its shape.
Tensor unread(const Tensor& query, at::IntArrayRef shape, at::ScalarType dtype) {
  return at::empty(shape, query.options().dtype(dtype));
}

// In memory as (batch, seqlen, heads, ...), which some operators promise for results in the order
// (batch, heads, seqlen, ...).
Tensor seqlen_first(const Tensor& tensor) {
  return tensor.transpose(1, 2).contiguous().transpose(1, 2);
}

Gradients seqlen_first(const Gradients& gradients) {
  const auto& [query, key, value] = gradients;
  return {seqlen_first(query), seqlen_first(key), seqlen_first(value)};
}

Gradients heads_second(const Gradients& gradients) {
  const auto& [query, key, value] = gradients;
  return {query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)};
}

// ------------------------------------------------------------------------------------------------
// aten::_scaled_dot_product_flash_attention: no mask, bottom-right

using SdpaOutputs =
    std::tuple<Tensor, Tensor, Tensor, Tensor, SymInt, SymInt, Tensor, Tensor, Tensor>;

void override_flash(torch::Library& library, const Stock& stock, const Stock& stock_backward) {
  library.impl("_scaled_dot_product_flash_attention",
               torch::CppFunction([stock](const Tensor& query, const Tensor& key,
                                          const Tensor& value, double dropout_p, bool is_causal,
                                          bool return_debug_mask, Scale scale) -> SdpaOutputs {
                 if (return_debug_mask || !takes(query, key, value, std::nullopt, dropout_p)) {
                   return stock.call<SdpaOutputs>(query, key, value, dropout_p, is_causal,
                                                  return_debug_mask, scale);
                 }
                 const Band band{is_causal, Corner::kBottomRight};
                 auto [out, lse] =
                     forward(stock.keys(), query, key, value, std::nullopt, band, scale);
                 return {std::move(out),
                         std::move(lse),
                         Tensor(),
                         Tensor(),
                         query.size(2),
                         key.size(2),
                         unread(query, {2}, at::kUInt64),
                         unread(query, {}, at::kUInt64),
                         unread(query, {0}, query.scalar_type())};
               }));
  library.impl("_scaled_dot_product_flash_attention_backward",
               torch::CppFunction([stock = stock_backward](
                                      const Tensor& grad_out, const Tensor& query,
                                      const Tensor& key, const Tensor& value, const Tensor& out,
                                      const Tensor& lse, const Tensor& cum_seq_q,
                                      const Tensor& cum_seq_k, int64_t max_q, int64_t max_k,
                                      double dropout_p, bool is_causal, const Tensor& philox_seed,
                                      const Tensor& philox_offset, Scale scale) -> Gradients {
                 if (!grad_out.defined()) return {};  // nothing depends on out
                 if (!takes(query, key, value, std::nullopt, dropout_p)) {
                   return stock.call<Gradients>(grad_out, query, key, value, out, lse, cum_seq_q,
                                                cum_seq_k, max_q, max_k, dropout_p, is_causal,
                                                philox_seed, philox_offset, scale);
                 }
                 const Band band{is_causal, Corner::kBottomRight};
                 return backward(stock.keys(), grad_out, query, key, value, out, lse, std::nullopt,
                                 band, scale);
               }));
}

// ------------------------------------------------------------------------------------------------
// aten::_flash_attention_forward: (batch, seqlen, heads, head_dim), or packed sequences, (tokens,
// heads, head_dim), which torch.nn.attention.varlen gives it; bottom-right, with windows

using FlashOutputs = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

Band flash_band(bool is_causal, std::optional<int64_t> left, std::optional<int64_t> right) {
  const auto side = [](std::optional<int64_t> window) {
    return std::max<int64_t>(window.value_or(-1), -1);
  };
  return {is_causal, Corner::kBottomRight, side(left), side(right)};
}

bool has_lengths(const OptionalTensor& cum_seq_q, const OptionalTensor& cum_seq_k) {
  return cum_seq_q && cum_seq_q->defined() && cum_seq_k && cum_seq_k->defined();
}

bool takes_packed(const Tensor& query, const Tensor& key, const Tensor& value,
                  const OptionalTensor& cum_seq_q, const OptionalTensor& cum_seq_k,
                  double dropout_p) {
  return query.dim() == 3 && has_lengths(cum_seq_q, cum_seq_k) &&
         cum_seq_q->scalar_type() == at::kInt && cum_seq_k->scalar_type() == at::kInt &&
         takes_tensors(query, key, value, 1, dropout_p);
}

// The forward, boxed: its first 15 arguments are those of torch 2.11, and newer versions have more.
class FlashRows : public c10::OperatorKernel {
 public:
  explicit FlashRows(const Stock& stock) : stock_(stock) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
    const size_t count = op.schema().arguments().size();
    const auto arguments = torch::jit::last(*stack, count);
    if (std::optional<FlashOutputs> outputs = ours(arguments)) {
      torch::jit::drop(*stack, count);
      std::apply([&](const auto&... tensors) { torch::jit::push(*stack, tensors...); }, *outputs);
    } else {
      stock_.call_boxed(stack);
    }
  }

 private:
  static constexpr size_t kReturnDebugMask = 9, kAlibiSlopes = 14;

  // Nothing where torch's kernel has to do it.
  std::optional<FlashOutputs> ours(c10::ArrayRef<c10::IValue> arguments) const {
    const auto tensor = [&](size_t i) { return arguments[i].toTensor(); };
    const auto optional = [&](size_t i) { return arguments[i].toOptional<Tensor>(); };
    if (arguments[kReturnDebugMask].toBool()) return std::nullopt;
    for (const c10::IValue& value : arguments.slice(kAlibiSlopes)) {
      if (!value.isNone()) return std::nullopt;
    }
    const Tensor query = tensor(0), key = tensor(1), value = tensor(2);
    const OptionalTensor cum_seq_q = optional(3), cum_seq_k = optional(4), seqused_k = optional(13);
    const double dropout_p = arguments[7].toDouble();
    const bool is_causal = arguments[8].toBool();
    const auto scale = arguments[10].toOptional<double>();
    const Band band = flash_band(is_causal, arguments[11].toOptional<int64_t>(),
                                 arguments[12].toOptional<int64_t>());
    const auto results = [&](const Tensor& out, const Tensor& lse) -> FlashOutputs {
      return {out, lse, unread(query, {2}, at::kUInt64), unread(query, {}, at::kUInt64),
              unread(query, {0}, query.scalar_type())};
    };
    if (takes_packed(query, key, value, cum_seq_q, cum_seq_k, dropout_p)) {
      RECORD_FUNCTION("fa::forward_varlen", c10::ArrayRef<const c10::IValue>{});
      const auto [out, lse] = forward_varlen_op().redispatch(
          stock_.keys(), query, key, value, *cum_seq_q, *cum_seq_k, is_causal, scale,
          band.window_left, band.window_right, seqused_k, /*deterministic=*/false);
      return results(out, lse);
    }
    if (cum_seq_q || cum_seq_k || seqused_k || !are_4d(query, key, value)) return std::nullopt;
    const Tensor q = query.transpose(1, 2), k = key.transpose(1, 2), v = value.transpose(1, 2);
    if (!takes(q, k, v, std::nullopt, dropout_p)) return std::nullopt;
    const auto [out, lse] = forward(stock_.keys(), q, k, v, std::nullopt, band, scale);
    return results(out.transpose(1, 2), lse);
  }

  const Stock stock_;
};

void override_flash_rows(torch::Library& library, const Stock& stock, const Stock& stock_backward) {
  library.impl("_flash_attention_forward",
               torch::CppFunction::makeFromBoxedFunctor(std::make_unique<FlashRows>(stock)));
  library.impl(
      "_flash_attention_backward",
      torch::CppFunction(
          [stock = stock_backward](const Tensor& grad_out, const Tensor& query, const Tensor& key,
                                   const Tensor& value, const Tensor& out, const Tensor& lse,
                                   const Tensor& cum_seq_q, const Tensor& cum_seq_k, int64_t max_q,
                                   int64_t max_k, double dropout_p, bool is_causal,
                                   const Tensor& rng_state, const Tensor& unused, Scale scale,
                                   std::optional<int64_t> window_size_left,
                                   std::optional<int64_t> window_size_right) -> Gradients {
            if (!grad_out.defined()) return {};
            const Band band = flash_band(is_causal, window_size_left, window_size_right);
            if (takes_packed(query, key, value, cum_seq_q, cum_seq_k, dropout_p)) {
              RECORD_FUNCTION("fa::backward_varlen", c10::ArrayRef<const c10::IValue>{});
              return backward_varlen_op().redispatch(
                  stock.keys(), grad_out, query, key, value, out, lse, cum_seq_q, cum_seq_k,
                  is_causal, scale, band.window_left, band.window_right, /*seqused_k=*/std::nullopt,
                  at::globalContext().deterministicAlgorithms());
            }
            if (!cum_seq_q.defined() && !cum_seq_k.defined() && are_4d(query, key, value)) {
              const Tensor q = query.transpose(1, 2), k = key.transpose(1, 2),
                           v = value.transpose(1, 2);
              if (takes(q, k, v, std::nullopt, dropout_p)) {
                return heads_second(backward(stock.keys(), grad_out.transpose(1, 2), q, k, v,
                                             out.transpose(1, 2), lse, std::nullopt, band, scale));
              }
            }
            return stock.call<Gradients>(grad_out, query, key, value, out, lse, cum_seq_q,
                                         cum_seq_k, max_q, max_k, dropout_p, is_causal, rng_state,
                                         unused, scale, window_size_left, window_size_right);
          }));
}

// ------------------------------------------------------------------------------------------------
// aten::_scaled_dot_product_cudnn_attention: additive mask, top-left. The first choice of
// F.scaled_dot_product_attention on Hopper

// A bool mask comes here as numbers, and torch 2.11 writes -65504 where it hides a key, rounded to
// the dtype of query: a query that sees no key would see them all. -inf is meant. In bfloat16,
// where that is -65536, no other mask will have it; in float16 it is the lowest number.
OptionalTensor cudnn_mask(const OptionalTensor& mask, const Tensor& query) {
  if (!mask || !mask->defined() || mask->scalar_type() != query.scalar_type()) return mask;
  Tensor values = *mask;
  for (int64_t dim = 0; dim < values.dim(); ++dim) {  // what is broadcast is read once
    if (values.stride(dim) == 0 && values.size(dim) > 1) values = values.narrow(dim, 0, 1);
  }
  // Divided by 1, or by 0: a scalar in at::where would be copied from the host first.
  values = values.div(values.ne(-65504.0));
  return values.expand(mask->sizes());
}

void override_cudnn(torch::Library& library, const Stock& stock, const Stock& stock_backward) {
  library.impl("_scaled_dot_product_cudnn_attention",
               torch::CppFunction([stock](const Tensor& query, const Tensor& key,
                                          const Tensor& value, const OptionalTensor& attn_bias,
                                          bool compute_log_sumexp, double dropout_p, bool is_causal,
                                          bool return_debug_mask, Scale scale) -> SdpaOutputs {
                 if (return_debug_mask || !takes(query, key, value, attn_bias, dropout_p)) {
                   return stock.call<SdpaOutputs>(query, key, value, attn_bias, compute_log_sumexp,
                                                  dropout_p, is_causal, return_debug_mask, scale);
                 }
                 const Band band{is_causal, Corner::kTopLeft};
                 auto [out, lse] = forward(stock.keys(), query, key, value,
                                           cudnn_mask(attn_bias, query), band, scale);
                 return {std::move(out),
                         lse.unsqueeze(-1),
                         Tensor(),
                         Tensor(),
                         query.size(2),
                         key.size(2),
                         unread(query, {}, at::kLong),
                         unread(query, {}, at::kLong),
                         Tensor()};
               }));
  library.impl(
      "_scaled_dot_product_cudnn_attention_backward",
      torch::CppFunction(
          [stock = stock_backward](const Tensor& grad_out, const Tensor& query, const Tensor& key,
                                   const Tensor& value, const Tensor& out, const Tensor& lse,
                                   const Tensor& philox_seed, const Tensor& philox_offset,
                                   const Tensor& attn_bias, const Tensor& cum_seq_q,
                                   const Tensor& cum_seq_k, int64_t max_q, int64_t max_k,
                                   double dropout_p, bool is_causal, Scale scale) -> Gradients {
            if (!grad_out.defined()) return {};
            if (!takes(query, key, value, attn_bias, dropout_p)) {
              return stock.call<Gradients>(grad_out, query, key, value, out, lse, philox_seed,
                                           philox_offset, attn_bias, cum_seq_q, cum_seq_k, max_q,
                                           max_k, dropout_p, is_causal, scale);
            }
            const Band band{is_causal, Corner::kTopLeft};
            return backward(stock.keys(), grad_out, query, key, value, out, lse.squeeze(-1),
                            cudnn_mask(attn_bias, query), band, scale);
          }));
}

// ------------------------------------------------------------------------------------------------
// aten::_scaled_dot_product_efficient_attention: additive mask, top-left

using EfficientOutputs = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using EfficientGradients = std::tuple<Tensor, Tensor, Tensor, Tensor>;

void override_efficient(torch::Library& library, const Stock& stock, const Stock& stock_backward) {
  library.impl("_scaled_dot_product_efficient_attention",
               torch::CppFunction([stock](const Tensor& query, const Tensor& key,
                                          const Tensor& value, const OptionalTensor& attn_bias,
                                          bool compute_log_sumexp, double dropout_p, bool is_causal,
                                          Scale scale) -> EfficientOutputs {
                 if (!takes(query, key, value, attn_bias, dropout_p)) {
                   return stock.call<EfficientOutputs>(query, key, value, attn_bias,
                                                       compute_log_sumexp, dropout_p, is_causal,
                                                       scale);
                 }
                 const Band band{is_causal, Corner::kTopLeft};
                 auto [out, lse] = forward(stock.keys(), query, key, value, attn_bias, band, scale);
                 const int64_t rows = query.size(2), rounded = (rows + 31) / 32 * 32;
                 if (!compute_log_sumexp) {
                   lse = lse.new_empty({query.size(0), query.size(1), 0});
                 } else if (rounded != rows) {
                   lse = at::constant_pad_nd(lse, {0, rounded - rows},
                                             std::numeric_limits<double>::infinity());
                 }
                 return {seqlen_first(out), std::move(lse), unread(query, {}, at::kLong),
                         unread(query, {}, at::kLong)};
               }));
  library.impl(
      "_scaled_dot_product_efficient_attention_backward",
      torch::CppFunction(
          [stock, stock_backward](const Tensor& grad_out, const Tensor& query, const Tensor& key,
                                  const Tensor& value, const Tensor& attn_bias, const Tensor& out,
                                  const Tensor& lse, const Tensor& philox_seed,
                                  const Tensor& philox_offset, double dropout_p,
                                  std::array<bool, 4> grad_input_mask, bool is_causal,
                                  Scale scale) -> EfficientGradients {
            if (!grad_out.defined()) return {};
            const auto call_stock = [&](const Tensor& out, const Tensor& lse,
                                        const Tensor& philox_seed, const Tensor& philox_offset) {
              return stock_backward.call<EfficientGradients>(
                  grad_out, query, key, value, attn_bias, out, lse, philox_seed, philox_offset,
                  dropout_p, grad_input_mask, is_causal, scale);
            };
            if (!takes(query, key, value, attn_bias, dropout_p)) {
              return call_stock(out, lse, philox_seed, philox_offset);
            }
            if (grad_input_mask[3]) {
              // Compiled code does not tell the forward that the mask wants a gradient, so it was
              // ours: what torch's backward takes comes from torch's forward.
              auto [stock_out, stock_lse, seed, offset] = stock.call<EfficientOutputs>(
                  query, key, value, OptionalTensor(attn_bias), true, dropout_p, is_causal, scale);
              return call_stock(stock_out, stock_lse, seed, offset);
            }
            const Band band{is_causal, Corner::kTopLeft};
            const auto [grad_query, grad_key, grad_value] =
                seqlen_first(backward(stock.keys(), grad_out, query, key, value, out,
                                      lse.narrow(2, 0, query.size(2)), attn_bias, band, scale));
            return {grad_query, grad_key, grad_value, Tensor()};
          }));
}

// ------------------------------------------------------------------------------------------------
// aten::_scaled_dot_product_flash_attention_for_cpu: additive mask, top-left

void override_cpu(torch::Library& library, const Stock& stock, const Stock& stock_backward) {
  library.impl("_scaled_dot_product_flash_attention_for_cpu",
               torch::CppFunction([stock](const Tensor& query, const Tensor& key,
                                          const Tensor& value, double dropout_p, bool is_causal,
                                          const OptionalTensor& attn_mask, Scale scale) -> Outputs {
                 if (!takes(query, key, value, attn_mask, dropout_p)) {
                   return stock.call<Outputs>(query, key, value, dropout_p, is_causal, attn_mask,
                                              scale);
                 }
                 const Band band{is_causal, Corner::kTopLeft};
                 auto [out, lse] = forward(stock.keys(), query, key, value, attn_mask, band, scale);
                 return {std::move(out), seqlen_first(lse)};
               }));
  library.impl("_scaled_dot_product_flash_attention_for_cpu_backward",
               torch::CppFunction([stock = stock_backward](
                                      const Tensor& grad_out, const Tensor& query,
                                      const Tensor& key, const Tensor& value, const Tensor& out,
                                      const Tensor& lse, double dropout_p, bool is_causal,
                                      const OptionalTensor& attn_mask, Scale scale) -> Gradients {
                 if (!grad_out.defined()) return {};
                 if (!takes(query, key, value, attn_mask, dropout_p)) {
                   return stock.call<Gradients>(grad_out, query, key, value, out, lse, dropout_p,
                                                is_causal, attn_mask, scale);
                 }
                 const Band band{is_causal, Corner::kTopLeft};
                 return seqlen_first(backward(stock.keys(), grad_out, query, key, value, out, lse,
                                              attn_mask, band, scale));
               }));
}

// ------------------------------------------------------------------------------------------------
// The life of an override

struct Slot {
  const char* forward;
  const char* backward;
  void (*override)(torch::Library&, const Stock& forward, const Stock& backward);
};

constexpr Slot kSlots[] = {
    {"_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward",
     override_flash},
    {"_flash_attention_forward", "_flash_attention_backward", override_flash_rows},
    {"_scaled_dot_product_cudnn_attention", "_scaled_dot_product_cudnn_attention_backward",
     override_cudnn},
    {"_scaled_dot_product_efficient_attention", "_scaled_dot_product_efficient_attention_backward",
     override_efficient},
    {"_scaled_dot_product_flash_attention_for_cpu",
     "_scaled_dot_product_flash_attention_for_cpu_backward", override_cpu},
};

// The dispatcher warns, once in a process, that a kernel replaces another; here that is the
// purpose.
class Silence : public c10::WarningHandler {
 public:
  void process(const c10::Warning&) override {}
};

class Override : public torch::CustomClassHolder {
 public:
  // key: "CPU" or "CUDA". operators: names of forwards in kSlots, each of which brings its
  // backward.
  Override(const std::string& key, const std::vector<std::string>& operators) {
    Silence silence;
    const c10::WarningUtils::WarningHandlerGuard guard(&silence);
    const c10::DispatchKey dispatch_key = c10::parseDispatchKey(key);
    auto library = std::make_unique<torch::Library>(torch::Library::IMPL, "aten", dispatch_key,
                                                    __FILE__, __LINE__);
    for (const std::string& name : operators) {
      const auto* slot = std::find_if(std::begin(kSlots), std::end(kSlots),
                                      [&](const Slot& slot) { return name == slot.forward; });
      TORCH_CHECK(slot != std::end(kSlots),
                  "operators: must be fused attention operators of torch, got ", name);
      slot->override(*library, Stock(slot->forward, dispatch_key),
                     Stock(slot->backward, dispatch_key));
    }
    library_ = std::move(library);
  }

  // torch's kernels are back; once more does nothing.
  void remove() { library_.reset(); }

 private:
  std::unique_ptr<torch::Library> library_;  // its end is that of its registrations
};

}  // namespace
}  // namespace fa

TORCH_LIBRARY_FRAGMENT(fa, m) {
  m.class_<fa::Override>("Override")
      .def(torch::init<std::string, std::vector<std::string>>())
      .def("remove", &fa::Override::remove);
}
