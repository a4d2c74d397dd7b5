// What every binding needs: checks that name the argument, tensors as arrays, torch's thread pool.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <functional>
#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "common/types.h"
#include "cpu/parallel.h"

namespace fc::binding {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline std::string text(const char* words) { return words; }
inline std::string text(int64_t x) { return std::to_string(x); }
inline std::string text(double x) { return std::to_string(x); }
inline std::string text(ScalarType type) { return torch::headeronly::toString(type); }
inline std::string text(std::initializer_list<int64_t> sizes) {  // -1 stands for any size
  std::string all;
  for (const int64_t size : sizes) all += (all.empty() ? "[" : ", ") + (size < 0 ? "any" : std::to_string(size));
  return all + "]";
}
inline std::string text(const Tensor& t) {  // its shape
  std::string all;
  for (int64_t i = 0; i < t.dim(); ++i) all += (i ? ", " : "[") + std::to_string(t.size(i));
  return t.dim() ? all + "]" : "[]";
}

// Throws "<name>: got <got>, need <needed...>" unless ok; nothing is put into words before.
template <class Got, class... Needed>
void need(bool ok, const char* name, const Got& got, const Needed&... needed) {
  if (!ok) throw std::invalid_argument(std::string(name) + ": got " + text(got) + ", need " + (text(needed) + ...));
}

// Shape `sizes` (-1: any).
inline void need_sizes(const char* name, const Tensor& t, std::initializer_list<int64_t> sizes) {
  bool ok = t.dim() == static_cast<int64_t>(sizes.size());
  int64_t i = 0;
  for (const int64_t size : sizes) {
    ok = ok && (size < 0 || t.size(i) == size);
    ++i;
  }
  need(ok, name, t, "shape ", sizes);
}

// Shape `sizes` on the CPU.
inline void need_shape(const char* name, const Tensor& t, std::initializer_list<int64_t> sizes) {
  need_sizes(name, t, sizes);
  need(t.is_cpu(), name, "a tensor on another device", "the CPU, as the first argument");
}

inline void need_type(const char* name, const Tensor& t, ScalarType type) {
  need(t.scalar_type() == type, name, t.scalar_type(), type);
}

inline void need_contiguous(const char* name, const Tensor& t) {
  need(t.is_contiguous(), name, "a strided view", "a contiguous tensor");
}

// A contiguous array of one type on the CPU.
template <class T>
const T* array(const char* name, const Tensor& t, std::initializer_list<int64_t> sizes, ScalarType type) {
  need_shape(name, t, sizes);
  need_type(name, t, type);
  need_contiguous(name, t);
  return static_cast<const T*>(t.const_data_ptr());
}
inline const int32_t* int32s(const char* name, const Tensor& t, std::initializer_list<int64_t> sizes) {
  return array<int32_t>(name, t, sizes, ScalarType::Int);
}
inline const int64_t* int64s(const char* name, const Tensor& t, std::initializer_list<int64_t> sizes) {
  return array<int64_t>(name, t, sizes, ScalarType::Long);
}
inline const float* floats(const char* name, const Tensor& t, std::initializer_list<int64_t> sizes) {
  return array<float>(name, t, sizes, ScalarType::Float);
}

inline Type type_of(const char* name, const Tensor& t) {
  const ScalarType type = t.scalar_type();
  need(type == ScalarType::Float || type == ScalarType::BFloat16, name, type, "Float or BFloat16");
  return type == ScalarType::Float ? Type::kFloat32 : Type::kBFloat16;
}

inline void need_unit_stride(const char* name, const Tensor& t) {
  const int64_t last = t.dim() - 1;
  need(t.size(last) <= 1 || t.stride(last) == 1, name, t.stride(last), "stride 1 in the last dimension");
}

// Of one of a cache pool's blocks.
inline int64_t block_bytes(const Tensor& pool) {
  need(pool.dim() >= 1 && pool.is_contiguous(), "pools", pool, "contiguous pools [blocks, ...]");
  return pool.size(0) ? pool.numel() / pool.size(0) * static_cast<int64_t>(pool.element_size()) : 0;
}

inline Pool torch_pool() {
  return {torch::stable::get_num_threads(),
          [](int64_t n, const std::function<void(int64_t, int64_t)>& f) { torch::stable::parallel_for(0, n, 1, f); }};
}

}  // namespace fc::binding
