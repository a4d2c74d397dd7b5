// The losses: schemas, shape checks, and tensors turned into pointers and sizes.
#include "bindings/checks.h"
#include "cpu/advantage_regression.h"
#include "cpu/policy_loss.h"

namespace {

using namespace fc::binding;

const bool* bools(const char* name, const Tensor& t, std::initializer_list<int64_t> sizes) {
  return array<bool>(name, t, sizes, ScalarType::Bool);
}

template <int64_t N>
Tensor tensor_of(const double (&value)[N], const Tensor& like) {
  Tensor sums = torch::stable::new_empty(like, {N}, ScalarType::Double);
  std::copy(value, value + N, static_cast<double*>(sums.mutable_data_ptr()));
  return sums;
}

std::tuple<Tensor, Tensor> policy_loss_forward(const Tensor& logprob, const Tensor& old_logprob,
                                               const std::optional<Tensor>& ref_logprob, const Tensor& advantage,
                                               const Tensor& mask, const Tensor& segment_ids, double clip_low,
                                               double clip_high, double dual_clip, int64_t form, int64_t ratio,
                                               bool per_sequence, double beta, int64_t kl) {
  need_shape("logprob", logprob, {-1});
  need_shape("advantage", advantage, {-1});
  need(form >= 0 && form <= 2, "form", form, "0 (clip), 1 (cispo) or 2 (reinforce)");
  need(ratio == 0 || ratio == 1, "ratio", ratio, "0 (token) or 1 (sequence)");
  need(kl >= 1 && kl <= 3, "kl", kl, "1, 2 or 3");
  need(beta == 0 || ref_logprob, "ref_logprob", "None", "a tensor, since beta = ", beta);
  fc::PolicyLoss a{};
  a.terms = {clip_low, clip_high, dual_clip, static_cast<int>(form), static_cast<int>(kl), beta};
  a.sequence_ratio = ratio == 1, a.per_sequence = per_sequence;
  a.T = logprob.size(0), a.S = advantage.size(0);
  a.logprob = floats("logprob", logprob, {a.T});
  a.old = floats("old_logprob", old_logprob, {a.T});
  a.ref = ref_logprob ? floats("ref_logprob", *ref_logprob, {a.T}) : nullptr;
  a.advantage = floats("advantage", advantage, {a.S});
  a.mask = bools("mask", mask, {a.T});
  a.segment_ids = int64s("segment_ids", segment_ids, {a.T});
  Tensor grad = torch::stable::new_empty(logprob, {a.T});
  a.grad = static_cast<float*>(grad.mutable_data_ptr());
  return {tensor_of(fc::policy_loss(a, torch_pool()).value, logprob), grad};
}

std::tuple<Tensor, Tensor> advantage_regression_forward(const Tensor& logprob, const Tensor& anchor,
                                                        const Tensor& advantage, const Tensor& mask,
                                                        const Tensor& segment_ids, double beta, int64_t length_norm,
                                                        int64_t max_length, double floor) {
  need_shape("logprob", logprob, {-1});
  need_shape("advantage", advantage, {-1});
  need(beta > 0, "beta", beta, "> 0");
  need(length_norm >= 0 && length_norm <= 2, "length_norm", length_norm, "0 (none), 1 (seq) or 2 (max)");
  need(length_norm != 2 || max_length >= 1, "max_length", max_length, ">= 1 with length_norm 2");
  fc::AdvantageRegression a{};
  a.T = logprob.size(0), a.S = advantage.size(0);
  a.logprob = floats("logprob", logprob, {a.T});
  a.anchor = floats("anchor", anchor, {a.T});
  a.advantage = floats("advantage", advantage, {a.S});
  a.mask = bools("mask", mask, {a.T});
  a.segment_ids = int64s("segment_ids", segment_ids, {a.T});
  a.beta = beta, a.length_norm = static_cast<int>(length_norm), a.max_length = max_length;
  a.floor = static_cast<float>(floor);
  Tensor grad = torch::stable::new_empty(logprob, {a.T});
  a.grad = static_cast<float*>(grad.mutable_data_ptr());
  return {tensor_of(fc::advantage_regression(a, torch_pool()).value, logprob), grad};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(fastcollab, m) {
  m.def(
      "policy_loss_forward(Tensor logprob, Tensor old_logprob, Tensor? ref_logprob, Tensor advantage, Tensor mask, "
      "Tensor segment_ids, float clip_low, float clip_high, float dual_clip, int form, int ratio, bool per_sequence, "
      "float beta, int kl) -> (Tensor, Tensor)");
  m.def(
      "advantage_regression_forward(Tensor logprob, Tensor anchor, Tensor advantage, Tensor mask, Tensor segment_ids, "
      "float beta, int length_norm, int max_length, float floor) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(fastcollab, CPU, m) {
  m.impl("policy_loss_forward", TORCH_BOX(&policy_loss_forward));
  m.impl("advantage_regression_forward", TORCH_BOX(&advantage_regression_forward));
}
