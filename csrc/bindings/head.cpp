// The LM head's operators: schemas, shape checks, tensors turned into pointers and sizes, torch's matrix product.
#include <array>
#include <limits>

#include "bindings/checks.h"
#include "cpu/linear_logprob.h"
#include "cpu/linear_policy_loss.h"

namespace {

using namespace fc::binding;

Tensor view(const fc::Matrix& m) {
  const std::array<int64_t, 2> sizes{m.rows, m.cols}, strides{m.row_stride, m.col_stride};
  return torch::stable::from_blob(const_cast<float*>(m.data), sizes, strides,
                                  torch::stable::Device(torch::headeronly::DeviceType::CPU), ScalarType::Float);
}

void torch_gemm(const fc::Matrix& a, const fc::Matrix& b, float* c, int64_t c_stride) {
  using torch::stable::detail::from;
  std::array<StableIValue, 3> stack{from(view(a)), from(view(b)), from(view({c, a.rows, b.cols, c_stride, 1}))};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::mm", "out", stack.data(), TORCH_ABI_VERSION));
  torch::stable::detail::to<Tensor>(stack[0]);  // takes the result, which is c
}

fc::Table table(const char* name, const Tensor& t, std::initializer_list<int64_t> sizes) {
  need_shape(name, t, sizes);
  need_unit_stride(name, t);
  return {t.const_data_ptr(), type_of(name, t), t.size(1), t.stride(0)};
}

// The head with its bias in fp32.
struct HeadOf : fc::Head {
  std::vector<float> wide_bias;

  HeadOf(const Tensor& h_, const Tensor& weight_, const std::optional<Tensor>& bias_, double temperature_,
         double softcap_) {
    h = table("h", h_, {-1, -1});
    N = h_.size(0), D = h_.size(1);
    weight = table("weight", weight_, {-1, D});
    V = weight_.size(0);
    need(V > 0, "weight", weight_, "at least one row");
    need(temperature_ > 0, "temperature", temperature_, "> 0");
    need(softcap_ >= 0, "softcap", softcap_, ">= 0 (0: no softcap)");
    temperature = static_cast<float>(temperature_), softcap = static_cast<float>(softcap_);
    bias = nullptr;
    if (!bias_) return;
    need_shape("bias", *bias_, {V});
    need_unit_stride("bias", *bias_);
    const fc::Type type = type_of("bias", *bias_);
    if (type == fc::Type::kFloat32) {
      bias = static_cast<const float*>(bias_->const_data_ptr());
    } else {
      wide_bias.resize(V);
      fc::widen_row(bias_->const_data_ptr(), type, V, wide_bias.data());
      bias = wide_bias.data();
    }
  }
  HeadOf(const HeadOf&) = delete;
};

Tensor new_floats(const Tensor& like, std::initializer_list<int64_t> sizes) {
  return torch::stable::new_empty(like, sizes, ScalarType::Float);
}
float* data(Tensor& t, bool wanted = true) { return wanted ? static_cast<float*>(t.mutable_data_ptr()) : nullptr; }

// Gradients where they are needed, [0] elsewhere.
struct Gradients {
  Tensor dh, dw, db;
  fc::HeadGradient pointers;

  Gradients(const Tensor& h, const Tensor& weight, const std::optional<Tensor>& bias, bool need_h, bool need_w,
            bool need_b) {
    const auto like = [](const Tensor& t, bool needed, std::initializer_list<int64_t> sizes) {
      return needed ? torch::stable::new_empty(t, sizes) : torch::stable::new_empty(t, {0});
    };
    need_b = need_b && bias;
    dh = like(h, need_h, {h.size(0), h.size(1)});
    dw = like(weight, need_w, {weight.size(0), weight.size(1)});
    db = like(bias ? *bias : weight, need_b, {weight.size(0)});
    pointers = {need_h ? dh.mutable_data_ptr() : nullptr, need_w ? dw.mutable_data_ptr() : nullptr,
                need_b ? db.mutable_data_ptr() : nullptr, bias ? type_of("bias", *bias) : fc::Type::kFloat32};
  }
};

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> linear_logprob_forward(
    const Tensor& h, const Tensor& weight, const std::optional<Tensor>& bias, const Tensor& target,
    const std::optional<Tensor>& second, double temperature, double softcap, bool entropy, bool top1) {
  const HeadOf head(h, weight, bias, temperature, softcap);
  const int64_t* ids = int64s("target", target, {head.N});
  const int64_t* others = second ? int64s("second", *second, {head.N}) : nullptr;
  Tensor logprob = new_floats(h, {head.N}), lse = torch::stable::new_empty(h, {head.N}, ScalarType::Double);
  Tensor ent = new_floats(h, {entropy ? head.N : 0}), other = new_floats(h, {second ? head.N : 0});
  Tensor best = torch::stable::new_empty(target, {top1 ? head.N : 0});
  const fc::Scores scores{data(logprob), static_cast<double*>(lse.mutable_data_ptr()), data(ent, entropy),
                          data(other, others), top1 ? static_cast<int64_t*>(best.mutable_data_ptr()) : nullptr};
  fc::linear_logprob_forward(head, ids, others, scores, torch_pool(), torch_gemm);
  return {logprob, lse, ent, other, best};
}

std::tuple<Tensor, Tensor, Tensor> linear_logprob_backward(const Tensor& g_logprob,
                                                           const std::optional<Tensor>& g_entropy, const Tensor& h,
                                                           const Tensor& weight, const std::optional<Tensor>& bias,
                                                           const Tensor& target, const Tensor& lse,
                                                           const std::optional<Tensor>& entropy, double temperature,
                                                           double softcap, bool need_h, bool need_w, bool need_b) {
  const HeadOf head(h, weight, bias, temperature, softcap);
  const fc::Upstream upstream{
      floats("g_logprob", g_logprob, {head.N}), g_entropy ? floats("g_entropy", *g_entropy, {head.N}) : nullptr,
      entropy ? floats("entropy", *entropy, {head.N}) : nullptr,
      array<double>("lse", lse, {head.N}, ScalarType::Double), int64s("target", target, {head.N})};
  need(!upstream.g_entropy || upstream.entropy, "entropy", "nothing", "the rows' entropy, since g_entropy is given");
  Gradients out(h, weight, bias, need_h, need_w, need_b);
  fc::linear_logprob_backward(head, upstream, out.pointers, torch_pool(), torch_gemm);
  return {out.dh, out.dw, out.db};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> linear_policy_loss_forward(
    const Tensor& h, const Tensor& weight, const std::optional<Tensor>& bias, const Tensor& target, double temperature,
    double softcap, bool entropy, const Tensor& old_logprob, const std::optional<Tensor>& ref_logprob,
    const Tensor& advantage, const Tensor& mask, const Tensor& segment_ids, double clip_low, double clip_high,
    double dual_clip, int64_t form, bool per_sequence, double beta, int64_t kl, double scale, bool need_h, bool need_w,
    bool need_b) {
  const HeadOf head(h, weight, bias, temperature, softcap);
  const fc::Packed tokens{head.N, advantage.size(0), array<bool>("mask", mask, {head.N}, ScalarType::Bool),
                          int64s("segment_ids", segment_ids, {head.N}), floats("advantage", advantage, {-1})};
  const fc::PolicyTerms terms{clip_low, clip_high, dual_clip, static_cast<int>(form), static_cast<int>(kl), beta};
  const fc::LinearPolicyLoss a{head,
                               terms,
                               entropy,
                               per_sequence,
                               scale,
                               tokens,
                               int64s("target", target, {head.N}),
                               floats("old_logprob", old_logprob, {head.N}),
                               ref_logprob ? floats("ref_logprob", *ref_logprob, {head.N}) : nullptr};
  need(0 <= form && form <= 2, "form", form, "0 clip, 1 cispo or 2 reinforce");
  need(1 <= kl && kl <= 3, "kl", kl, "1, 2 or 3");
  Gradients out(h, weight, bias, need_h, need_w, need_b);
  Tensor sums = torch::stable::new_empty(h, {13}, ScalarType::Double);
  fc::linear_policy_loss(a, out.pointers, static_cast<double*>(sums.mutable_data_ptr()), torch_pool(), torch_gemm);
  return {sums, out.dh, out.dw, out.db};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(fastcollab, m) {
  m.def(
      "linear_logprob_forward(Tensor h, Tensor weight, Tensor? bias, Tensor target, Tensor? second, "
      "float temperature, float softcap, bool entropy, bool top1) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "linear_logprob_backward(Tensor g_logprob, Tensor? g_entropy, Tensor h, Tensor weight, Tensor? bias, "
      "Tensor target, Tensor lse, Tensor? entropy, float temperature, float softcap, bool need_h, bool need_w, "
      "bool need_b) -> (Tensor, Tensor, Tensor)");
  m.def(
      "linear_policy_loss_forward(Tensor h, Tensor weight, Tensor? bias, Tensor target, float temperature, "
      "float softcap, bool entropy, Tensor old_logprob, Tensor? ref_logprob, Tensor advantage, Tensor mask, "
      "Tensor segment_ids, float clip_low, float clip_high, float dual_clip, int form, bool per_sequence, float beta, "
      "int kl, float scale, bool need_h, bool need_w, bool need_b) -> (Tensor, Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(fastcollab, CPU, m) {
  m.impl("linear_logprob_forward", TORCH_BOX(&linear_logprob_forward));
  m.impl("linear_logprob_backward", TORCH_BOX(&linear_logprob_backward));
  m.impl("linear_policy_loss_forward", TORCH_BOX(&linear_policy_loss_forward));
}
