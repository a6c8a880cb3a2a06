// Attention from a C++ program without Python: loads the library of flashattn_ext, calls
// fa::forward through torch's dispatcher, and runs a model of AOTInductor that contains it.
//
//   attention LIBRARY [MODEL.pt2 EXAMPLE.pt]
//
// LIBRARY is flashattn_ext.LIBRARY; export_model.py writes the other two. Prints
// the differences from torch's attention and from the model in Python; exit code 1 if one is large.
#include <ATen/DynamicLibrary.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/torch.h>

#include <fstream>
#include <iostream>
#include <iterator>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

// The schema of fa::forward in C++.
using Forward = std::tuple<at::Tensor, at::Tensor>(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const std::optional<at::Tensor>& attn_mask, bool is_causal, std::optional<double> scale,
    c10::SymInt window_left, c10::SymInt window_right, bool bottom_right, bool deterministic);

bool report(const char* name, at::Tensor ours, const at::Tensor& expected) {
  ours = ours.to(expected.options());
  const double difference = (ours - expected).abs().max().item<double>();
  const bool close = at::allclose(ours, expected, /*rtol=*/1e-2, /*atol=*/1e-2);
  std::cout << name << ": largest difference " << difference << (close ? "" : ", TOO LARGE")
            << std::endl;
  return close;
}

bool call_operator(c10::Device device) {
  const auto forward =
      c10::Dispatcher::singleton().findSchemaOrThrow("fa::forward", "").typed<Forward>();
  const auto options =
      at::TensorOptions(device).dtype(device.is_cuda() ? at::kBFloat16 : at::kFloat);
  // (batch, heads, seqlen, head_dim); a key head serves two query heads.
  const at::Tensor query = at::randn({2, 8, 500, 64}, options);
  const at::Tensor key = at::randn({2, 4, 500, 64}, options);
  const at::Tensor value = at::randn({2, 4, 500, 64}, options);
  const auto [out, lse] =
      forward.call(query, key, value, /*attn_mask=*/std::nullopt, /*is_causal=*/true,
                   /*scale=*/std::nullopt, /*window_left=*/-1, /*window_right=*/-1,
                   /*bottom_right=*/false, /*deterministic=*/false);
  const auto exact = [](const at::Tensor& x) { return x.to(at::kCPU, at::kDouble); };
  const at::Tensor expected = at::scaled_dot_product_attention(
      exact(query), exact(key), exact(value), std::nullopt, 0.0, /*is_causal=*/true, std::nullopt,
      /*enable_gqa=*/true);
  return report("fa::forward", out, expected);
}

bool run_model(const std::string& model, const std::string& example) {
  std::ifstream file(example, std::ios::binary);
  const std::vector<char> bytes((std::istreambuf_iterator<char>(file)), {});
  const c10::List<c10::IValue> tensors = torch::pickle_load(bytes).toList();
  torch::inductor::AOTIModelPackageLoader loader(model);
  const std::vector<at::Tensor> results = loader.run({tensors.get(0).toTensor()});
  return report("model", results[0], tensors.get(1).toTensor());
}

int main(int argc, char** argv) {
  if (argc != 2 && argc != 4) {
    std::cerr << "usage: attention LIBRARY [MODEL.pt2 EXAMPLE.pt]" << std::endl;
    return 2;
  }
  try {
    const c10::InferenceMode inference;
    // Defines the operators; it stays loaded until the program ends.
    const at::DynamicLibrary library(argv[1], /*alt_name=*/nullptr, /*leak_handle=*/true);
    bool close = call_operator(torch::cuda::is_available() ? at::kCUDA : at::kCPU);
    if (argc == 4) close = run_model(argv[2], argv[3]) && close;
    return close ? 0 : 1;
  } catch (const c10::Error& error) {
    std::cerr << error.what_without_backtrace() << std::endl;
    return 1;
  }
}
