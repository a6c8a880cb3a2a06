// Typed handles of our operators, for what calls them from above the kernels.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <tuple>

namespace fa {

using Outputs = std::tuple<at::Tensor, at::Tensor>;
using Forward = Outputs(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                        const std::optional<at::Tensor>&, bool, std::optional<double>, c10::SymInt,
                        c10::SymInt, bool, bool);
using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using Backward = Gradients(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                           const at::Tensor&, const at::Tensor&, const at::Tensor&,
                           const std::optional<at::Tensor>&, bool, std::optional<double>,
                           c10::SymInt, c10::SymInt, bool, bool);

using ForwardVarlen = Outputs(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                              const at::Tensor&, const at::Tensor&, bool, std::optional<double>,
                              c10::SymInt, c10::SymInt, const std::optional<at::Tensor>&, bool);
using BackwardVarlen = Gradients(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                 const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                 const at::Tensor&, const at::Tensor&, bool, std::optional<double>,
                                 c10::SymInt, c10::SymInt, const std::optional<at::Tensor>&, bool);

inline const c10::TypedOperatorHandle<Forward>& forward_op() {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("fa::forward", "").typed<Forward>();
  return op;
}

inline const c10::TypedOperatorHandle<Backward>& backward_op() {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("fa::backward", "").typed<Backward>();
  return op;
}

inline const c10::TypedOperatorHandle<ForwardVarlen>& forward_varlen_op() {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("fa::forward_varlen", "")
                             .typed<ForwardVarlen>();
  return op;
}

inline const c10::TypedOperatorHandle<BackwardVarlen>& backward_varlen_op() {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("fa::backward_varlen", "")
                             .typed<BackwardVarlen>();
  return op;
}

}  // namespace fa
