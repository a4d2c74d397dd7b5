#include "cpu/head.h"

#include <algorithm>
#include <cstring>

#include "cpu/simd.h"

namespace fc {
namespace {

FC_CLONES void widen_all(const bf16* from, int64_t n, float* to) {
  for (int64_t i = 0; i < n; ++i) to[i] = widen(from[i]);
}
FC_CLONES void narrow_all(const float* from, int64_t n, bf16* to) {
  for (int64_t i = 0; i < n; ++i) to[i] = narrow<bf16>(from[i]);
}

const void* element(const void* data, Type type, int64_t i) {
  return static_cast<const char*>(data) + i * size_of(type);
}

}  // namespace

void widen_row(const void* from, Type type, int64_t n, float* to) {
  if (type == Type::kFloat32) {
    std::memcpy(to, from, n * sizeof(float));
  } else {
    widen_all(static_cast<const bf16*>(from), n, to);
  }
}

void narrow_row(const float* from, int64_t n, void* to, Type type) {
  if (type == Type::kFloat32) {
    std::memcpy(to, from, n * sizeof(float));
  } else {
    narrow_all(from, n, static_cast<bf16*>(to));
  }
}

Table Table::columns(int64_t first, int64_t n) const { return {element(data, type, first), type, n, stride}; }

Table Table::from_row(int64_t first) const { return {element(data, type, first * stride), type, cols, stride}; }

Matrix Table::rows(int64_t first, int64_t n, int64_t padded, float* scratch) const {
  const void* from = element(data, type, first * stride);
  if (is_wide() && padded == n) return {static_cast<const float*>(from), n, cols, stride, 1};
  for (int64_t i = 0; i < n; ++i) widen_row(element(from, type, i * stride), type, cols, scratch + i * cols);
  std::fill_n(scratch + n * cols, (padded - n) * cols, 0.0f);
  return {scratch, padded, cols, cols, 1};
}

void Table::gather(const int64_t* index, int64_t n, float* out) const {
  for (int64_t i = 0; i < n; ++i) widen_row(element(data, type, index[i] * stride), type, cols, out + i * cols);
}

void scatter(const float* from, const int64_t* index, int64_t n, int64_t cols, void* out, Type type, int64_t rows) {
  for (int64_t r = 0, i = 0; r < rows; ++r) {
    void* to = element(out, type, r * cols);
    if (i < n && index[i] == r) {
      narrow_row(from + i++ * cols, cols, to, type);
    } else {
      std::memset(to, 0, cols * size_of(type));
    }
  }
}

}  // namespace fc
