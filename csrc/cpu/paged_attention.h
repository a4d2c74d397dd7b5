// paged_attention on CPU: append new K/V rows to their pages, then causal attention of each row over its pages.
#pragma once

#include <cstdint>

#include "common/types.h"
#include "cpu/parallel.h"

namespace fc {

// Sizes, and strides in elements. Every last dimension has unit stride.
struct PagedAttention {
  const void *q, *k, *v;        // [T, H, Dk], [T, Hkv, Dk], [T, Hkv, Dv]
  void *k_pool, *v_pool;        // [N, block, Hkv, Dk], [N, block, Hkv, Dv]
  void* out;                    // [T, H, Dv], contiguous
  Type type, pool_type;         // of q, k, v, out; of the pools
  const int32_t* slot_mapping;  // [T]
  const int32_t* block_table;   // [R, B]
  const int32_t* q_indptr;      // [R + 1]
  const int32_t* kv_len;        // [R]
  const float* sinks;           // [H] or null
  int64_t T, R, B, N, block, H, Hkv, Dk, Dv;
  int64_t q_token, q_head, k_token, k_head, v_token, v_head;
  int64_t k_pool_block, k_pool_slot, k_pool_head, v_pool_block, v_pool_slot, v_pool_head;
  float scale, softcap;  // softcap 0: off
  int64_t window;        // 0: off

  int64_t first_visible(int64_t position) const { return window > 0 && position >= window ? position - window + 1 : 0; }
};

// Throws std::invalid_argument, with the value got and the value needed, where an index points outside its array.
void paged_attention(const PagedAttention& a, const Pool& pool);

}  // namespace fc
