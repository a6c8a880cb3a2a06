// Autograd key of fa::forward. There is no derivative, and an output must not silently come without
// one: outputs of inputs that require grad raise in backward. torch's own fallback for this works
// on boxed arguments and takes 1 us of every call, with or without grad.
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/library.h>

#include <memory>
#include <optional>
#include <tuple>

namespace fa {
namespace {

using Result = std::tuple<at::Tensor, at::Tensor>;
using Forward = Result(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                       const std::optional<at::Tensor>&, bool, std::optional<double>, c10::SymInt,
                       c10::SymInt, bool);

Result forward_autograd(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                        const std::optional<at::Tensor>& attn_mask, bool is_causal,
                        std::optional<double> scale, c10::SymInt window_left,
                        c10::SymInt window_right, bool bottom_right) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("fa::forward", "").typed<Forward>();
  const at::Tensor mask = attn_mask.value_or(at::Tensor());
  for (const at::Tensor* tensor : {&query, &key, &value, &mask}) {
    TORCH_CHECK_NOT_IMPLEMENTED(!torch::autograd::isFwGradDefined(*tensor),
                                "Trying to use forward AD with fa::forward that does not support "
                                "it because it has not been implemented yet.");
  }
  const bool requires_grad =
      torch::autograd::compute_requires_grad(query, key, value, mask);  // false without grad mode
  Result result = [&] {
    const at::AutoDispatchBelowADInplaceOrView below;
    return op.call(query, key, value, attn_mask, is_causal, scale, std::move(window_left),
                   std::move(window_right), bottom_right);
  }();
  if (requires_grad) {
    std::shared_ptr<torch::autograd::Node> node(new torch::autograd::NotImplemented("fa::forward"),
                                                torch::autograd::deleteNode);
    node->set_next_edges(torch::autograd::collect_next_edges(query, key, value, mask));
    torch::autograd::set_history(std::get<0>(result), node);
    torch::autograd::set_history(std::get<1>(result), node);
  }
  return result;
}

}  // namespace
}  // namespace fa

TORCH_LIBRARY_IMPL(fa, Autograd, m) { m.impl("forward", &fa::forward_autograd); }
