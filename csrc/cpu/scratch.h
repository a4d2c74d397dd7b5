// Memory that a CPU operator writes before it reads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <memory>
#include <new>

namespace fc {

// Floats that begin a cache line.
struct FreeFloats {
  static constexpr std::align_val_t kAlign{64};
  void operator()(float* p) const { ::operator delete[](p, kAlign); }
};
using Floats = std::unique_ptr<float[], FreeFloats>;

// NaN where FASTCOLLAB_NAN_SCRATCH is set, as the tests do: what is read too early then shows.
inline Floats uninitialised(int64_t n) {
  static const bool poison = std::getenv("FASTCOLLAB_NAN_SCRATCH");
  Floats p(static_cast<float*>(::operator new[](n * sizeof(float), FreeFloats::kAlign)));
  if (poison) std::fill_n(p.get(), n, std::numeric_limits<float>::quiet_NaN());
  return p;
}

}  // namespace fc
