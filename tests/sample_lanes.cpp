// The row algorithm of the CUDA kernel on CPU, for tests/test_cuda_sample.py.
#include "common/sample_row.h"

namespace {

// Lane after lane, forwards or backwards: what one reads from another without a barrier between shows in the result.
template <int kCount, bool kBackwards>
struct Serial {
  static constexpr int kLanes = kCount;
  template <class F>
  void lanes(const F& f) const {
    for (int i = 0; i < kLanes; ++i) f(kBackwards ? kLanes - 1 - i : i);
  }
  void barrier() const {}
  void add(uint64_t* counter, uint64_t n) const { *counter += n; }
};

template <class T, class Team>
void sample_rows(const fc::Sample& a) {
  static fc::Scratch<Team::kLanes> scratch;
  for (int64_t r = 0; r < a.R; ++r) fc::sample_row<T>(Team{}, scratch, a, r);
}

template <class Team>
void sample_rows(const fc::Sample& a) {
  a.type == fc::Type::kFloat32 ? sample_rows<float, Team>(a) : sample_rows<uint16_t, Team>(a);
}

}  // namespace

// team: 0 the kernel's lanes, 1 the same backwards, 2 fewer.
extern "C" void sample(int team, int bf16, int64_t R, int64_t V, int64_t stride, const void* logits,
                       const float* temperature, const int32_t* top_k, const float* top_p, const float* min_p,
                       const int64_t* key, const int32_t* position, const int32_t* epoch, int64_t* id, float* logprob,
                       float* kept_mass) {
  const fc::Type type = bf16 ? fc::Type::kBFloat16 : fc::Type::kFloat32;
  const fc::Sample a{logits, type, R,        V,     stride, temperature, top_k,    top_p,
                     min_p,  key,  position, epoch, id,     logprob,     kept_mass};
  team == 0   ? sample_rows<Serial<1024, false>>(a)
  : team == 1 ? sample_rows<Serial<1024, true>>(a)
              : sample_rows<Serial<64, false>>(a);
}

// A weight's depth and its grains, as a bin adds them; one grain.
extern "C" void weigh(int64_t n, const float* below, float* weight, int32_t* depth, int64_t* grains, double* grain) {
  for (int64_t i = 0; i < n; ++i) {
    weight[i] = fc::exp32(-below[i]);
    depth[i] = static_cast<int>(below[i] * 16);
    grains[i] = static_cast<int64_t>(fc::grains(weight[i], depth[i]));
    grain[i] = fc::tally(1, depth[i]).mass;
  }
}
