// The operators in CUDA C++: checks that need no look at the data, and tensors turned into device pointers.
#ifdef FASTCOLLAB_CUDA
#include "bindings/checks.h"
#include "common/sample_row.h"
#include "cuda/copy_blocks.h"
#include "cuda/sample.h"

namespace {

using namespace fc::binding;

void need_device(const char* name, const Tensor& t, const Tensor& first) {
  need(t.is_cuda() && t.get_device_index() == first.get_device_index(), name, "a tensor on another device",
       "the device of the first");
}

// A contiguous array of one type on the device of `first`.
template <class T>
const T* array_on(const Tensor& first, const char* name, const Tensor& t, std::initializer_list<int64_t> sizes,
                  ScalarType type) {
  need_sizes(name, t, sizes);
  need_type(name, t, type);
  need_contiguous(name, t);
  need_device(name, t, first);
  return static_cast<const T*>(t.const_data_ptr());
}

void check(const char* op, const char* error) {
  if (error) throw std::runtime_error(std::string(op) + ": " + error);
}

std::tuple<Tensor, Tensor, Tensor> sample(const Tensor& logits, const Tensor& temperature, const Tensor& top_k,
                                          const Tensor& top_p, const Tensor& min_p, const Tensor& key,
                                          const Tensor& position, const Tensor& epoch, int64_t stream) {
  need_sizes("logits", logits, {-1, -1});
  need_unit_stride("logits", logits);
  fc::Sample a{};
  a.R = logits.size(0), a.V = logits.size(1), a.stride = logits.stride(0);
  need(a.V > 0 && a.V <= fc::kMaxVocab, "logits", logits, "1 to ", fc::kMaxVocab, " columns");
  a.logits = logits.const_data_ptr();
  a.type = type_of("logits", logits);
  a.temperature = array_on<float>(logits, "temperature", temperature, {a.R}, ScalarType::Float);
  a.top_k = array_on<int32_t>(logits, "top_k", top_k, {a.R}, ScalarType::Int);
  a.top_p = array_on<float>(logits, "top_p", top_p, {a.R}, ScalarType::Float);
  a.min_p = array_on<float>(logits, "min_p", min_p, {a.R}, ScalarType::Float);
  a.key = array_on<int64_t>(logits, "key", key, {a.R}, ScalarType::Long);
  a.position = array_on<int32_t>(logits, "position", position, {a.R}, ScalarType::Int);
  a.epoch = array_on<int32_t>(logits, "epoch", epoch, {a.R}, ScalarType::Int);
  Tensor id = torch::stable::new_empty(key, {a.R});
  Tensor logprob = torch::stable::new_empty(temperature, {a.R});
  Tensor kept_mass = torch::stable::new_empty(temperature, {a.R});
  a.id = static_cast<int64_t*>(id.mutable_data_ptr());
  a.logprob = static_cast<float*>(logprob.mutable_data_ptr());
  a.kept_mass = static_cast<float*>(kept_mass.mutable_data_ptr());
  check("sample", fc::sample_cuda(a, logits.get_device_index(), reinterpret_cast<void*>(stream)));
  return {id, logprob, kept_mass};
}

void copy_blocks(const std::vector<Tensor>& pools, const Tensor& pairs, int64_t stream) {
  if (pools.empty()) return;
  const int64_t* table = array_on<int64_t>(pools[0], "pairs", pairs, {-1, 2}, ScalarType::Long);
  if (pairs.size(0) == 0) return;
  std::vector<void*> data;
  std::vector<int64_t> bytes;
  for (const Tensor& pool : pools) {
    need_device("pools", pool, pools[0]);
    bytes.push_back(block_bytes(pool));
    data.push_back(pool.mutable_data_ptr());
  }
  check("copy_blocks",
        fc::copy_blocks_cuda(data.data(), bytes.data(), static_cast<int64_t>(data.size()), table, pairs.size(0),
                             pools[0].get_device_index(), reinterpret_cast<void*>(stream)));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastcollab, CUDA, m) {
  m.impl("sample", TORCH_BOX(&sample));
  m.impl("copy_blocks", TORCH_BOX(&copy_blocks));
}
#endif
