// The module flashattn_ext._C: what this build contains. The operators are in a library of their
// own, which needs no Python: C++ programs load it too (examples/cpp).
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/version.h>

#include <algorithm>
#include <iterator>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#if FA_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace {

#if FA_WITH_CUDA
constexpr const char* kCudaArchs = FA_CUDA_ARCHS;
#else
constexpr const char* kCudaArchs = "";
#endif

// "8.0+PTX;9.0a" -> ["8.0+PTX", "9.0a"].
std::vector<std::string> split_archs(std::string text) {
  std::replace(text.begin(), text.end(), ';', ' ');
  std::istringstream words(text);
  return {std::istream_iterator<std::string>(words), std::istream_iterator<std::string>()};
}

std::string compiler() {
#if defined(__clang__)
  return std::string("Clang ") + __clang_version__;
#elif defined(__GNUC__)
  return std::string("GCC ") + __VERSION__;
#elif defined(_MSC_VER)
  return "MSVC " + std::to_string(_MSC_VER);
#else
  return "unknown";
#endif
}

pybind11::dict build_info() {
  std::optional<std::string> cuda;
#if FA_WITH_CUDA
  cuda = std::to_string(CUDART_VERSION / 1000) + "." + std::to_string(CUDART_VERSION % 1000 / 10);
#endif
  pybind11::dict info;
  info["version"] = FA_VERSION;
  info["torch"] = TORCH_VERSION;
  info["cuda"] = cuda;
  info["archs"] = split_archs(kCudaArchs);
  info["with_cuda"] = cuda.has_value();
  info["with_sm90a"] = static_cast<bool>(FA_WITH_SM90A);
  info["compiler"] = compiler();
  return info;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.def("build_info", &build_info,
        "What this build contains: version, torch and cuda (None without) it was built with, "
        "archs, with_cuda, with_sm90a, compiler.");
}
