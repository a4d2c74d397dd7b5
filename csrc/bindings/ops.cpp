// The operators of generation: schemas, shape checks, and tensors turned into pointers and sizes.
#include <Python.h>

#include "bindings/checks.h"
#include "cpu/copy_blocks.h"
#include "cpu/paged_attention.h"
#include "cpu/sample.h"
#include "cpu/simd.h"

namespace {

using namespace fc::binding;

Tensor paged_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& k_pool, const Tensor& v_pool,
                       const Tensor& slot_mapping, const Tensor& block_table, const Tensor& q_indptr,
                       const Tensor& kv_len, double scale, int64_t window, double softcap,
                       const std::optional<Tensor>& sinks) {
  need_shape("q", q, {-1, -1, -1});
  need_shape("k_pool", k_pool, {-1, -1, -1, q.size(2)});
  fc::PagedAttention a{};
  a.T = q.size(0), a.H = q.size(1), a.Dk = q.size(2);
  a.N = k_pool.size(0), a.block = k_pool.size(1), a.Hkv = k_pool.size(2);
  need_shape("v_pool", v_pool, {a.N, a.block, a.Hkv, -1});
  a.Dv = v_pool.size(3);
  need_shape("k", k, {a.T, a.Hkv, a.Dk});
  need_shape("v", v, {a.T, a.Hkv, a.Dv});
  need(a.Hkv > 0 && a.H % a.Hkv == 0, "q", a.H, "heads in a multiple of ", a.Hkv);
  need(window >= 0, "window", window, ">= 0 (0: no window)");
  need(softcap >= 0, "softcap", softcap, ">= 0 (0: no softcap)");
  need_shape("block_table", block_table, {-1, -1});
  a.R = block_table.size(0), a.B = block_table.size(1);
  for (const auto& [name, t] : {std::pair{"q", &q}, {"k", &k}, {"v", &v}, {"k_pool", &k_pool}, {"v_pool", &v_pool}}) {
    need_unit_stride(name, *t);
  }
  a.type = type_of("q", q);
  a.pool_type = type_of("k_pool", k_pool);
  need_type("k", k, q.scalar_type());
  need_type("v", v, q.scalar_type());
  need_type("v_pool", v_pool, k_pool.scalar_type());
  a.slot_mapping = int32s("slot_mapping", slot_mapping, {a.T});
  a.block_table = int32s("block_table", block_table, {a.R, a.B});
  a.q_indptr = int32s("q_indptr", q_indptr, {a.R + 1});
  a.kv_len = int32s("kv_len", kv_len, {a.R});
  std::vector<float> sink_values;
  if (sinks) {
    need_shape("sinks", *sinks, {a.H});
    need_unit_stride("sinks", *sinks);
    const bool wide = type_of("sinks", *sinks) == fc::Type::kFloat32;
    const void* data = sinks->const_data_ptr();
    for (int64_t h = 0; h < a.H; ++h) {
      sink_values.push_back(wide ? static_cast<const float*>(data)[h]
                                 : fc::widen(static_cast<const fc::bf16*>(data)[h]));
    }
    a.sinks = sink_values.data();
  }
  a.q = q.const_data_ptr(), a.q_token = q.stride(0), a.q_head = q.stride(1);
  a.k = k.const_data_ptr(), a.k_token = k.stride(0), a.k_head = k.stride(1);
  a.v = v.const_data_ptr(), a.v_token = v.stride(0), a.v_head = v.stride(1);
  a.k_pool = k_pool.mutable_data_ptr(), a.v_pool = v_pool.mutable_data_ptr();
  a.k_pool_block = k_pool.stride(0), a.k_pool_slot = k_pool.stride(1), a.k_pool_head = k_pool.stride(2);
  a.v_pool_block = v_pool.stride(0), a.v_pool_slot = v_pool.stride(1), a.v_pool_head = v_pool.stride(2);
  a.scale = static_cast<float>(scale), a.softcap = static_cast<float>(softcap), a.window = window;
  Tensor out = torch::stable::new_empty(q, {a.T, a.H, a.Dv});
  a.out = out.mutable_data_ptr();
  fc::paged_attention(a, torch_pool());
  return out;
}

std::tuple<Tensor, Tensor, Tensor> sample(const Tensor& logits, const Tensor& temperature, const Tensor& top_k,
                                          const Tensor& top_p, const Tensor& min_p, const Tensor& key,
                                          const Tensor& position, const Tensor& epoch, int64_t) {
  need_shape("logits", logits, {-1, -1});
  need_unit_stride("logits", logits);
  fc::Sample a{};
  a.R = logits.size(0), a.V = logits.size(1), a.stride = logits.stride(0);
  need(a.V > 0, "logits", logits, "at least one column");
  a.logits = logits.const_data_ptr();
  a.type = type_of("logits", logits);
  a.temperature = floats("temperature", temperature, {a.R});
  a.top_k = int32s("top_k", top_k, {a.R});
  a.top_p = floats("top_p", top_p, {a.R});
  a.min_p = floats("min_p", min_p, {a.R});
  a.key = int64s("key", key, {a.R});
  a.position = int32s("position", position, {a.R});
  a.epoch = int32s("epoch", epoch, {a.R});
  Tensor id = torch::stable::new_empty(key, {a.R});
  Tensor logprob = torch::stable::new_empty(temperature, {a.R});
  Tensor kept_mass = torch::stable::new_empty(temperature, {a.R});
  a.id = static_cast<int64_t*>(id.mutable_data_ptr());
  a.logprob = static_cast<float*>(logprob.mutable_data_ptr());
  a.kept_mass = static_cast<float*>(kept_mass.mutable_data_ptr());
  fc::sample(a, torch_pool());
  return {id, logprob, kept_mass};
}

void copy_blocks(const std::vector<Tensor>& pools, const Tensor& pairs, int64_t) {
  const int64_t* table = int64s("pairs", pairs, {-1, 2});
  std::vector<fc::BlockPool> list;
  for (const Tensor& pool : pools) {
    need(pool.is_cpu(), "pools", "a pool on another device", "CPU, as the first");
    list.push_back({static_cast<char*>(pool.mutable_data_ptr()), pool.size(0), block_bytes(pool)});
  }
  fc::copy_blocks(list.data(), static_cast<int64_t>(list.size()), table, pairs.size(0), torch_pool());
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(fastcollab, m) {
  m.def(
      "paged_attention(Tensor q, Tensor k, Tensor v, Tensor(a!) k_pool, Tensor(b!) v_pool, Tensor slot_mapping, "
      "Tensor block_table, Tensor q_indptr, Tensor kv_len, float scale, int window=0, float softcap=0.0, "
      "Tensor? sinks=None) -> Tensor");
  m.def(
      "sample(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor key, "
      "Tensor position, Tensor epoch, int stream=0) -> (Tensor, Tensor, Tensor)");
  m.def("copy_blocks(Tensor(a!)[] pools, Tensor pairs, int stream=0) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(fastcollab, CPU, m) {
  m.impl("paged_attention", TORCH_BOX(&paged_attention));
  m.impl("sample", TORCH_BOX(&sample));
  m.impl("copy_blocks", TORCH_BOX(&copy_blocks));
}

// Importing the module registers the operators.
PyMODINIT_FUNC PyInit__C() {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
