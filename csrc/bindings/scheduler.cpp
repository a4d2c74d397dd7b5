// fastcollab._scheduler: the scheduler in Python, with the interface of fastcollab/scheduler.py. Sees pybind11, alone.
#include "scheduler/scheduler.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>

namespace py = pybind11;
using namespace pybind11::literals;

namespace {

using fc::Scheduler;

template <class T>
using Array = py::array_t<T, py::array::c_style | py::array::forcecast>;

template <class T>
std::span<const T> span(const Array<T>& array) {
  return {array.data(), static_cast<size_t>(array.size())};
}

// An array of its own.
template <class T>
py::array_t<T> copy(std::span<const T> values) {
  return py::array_t<T>(static_cast<py::ssize_t>(values.size()), values.data());
}

// The plan's vectors as arrays that share them; the last array to go frees the plan.
py::tuple arrays(fc::Plan made) {
  auto plan = std::make_unique<fc::Plan>(std::move(made));
  const auto rows = static_cast<py::ssize_t>(plan->rows.size());
  const auto width = rows ? static_cast<py::ssize_t>(plan->block_table.size()) / rows : 0;
  fc::Plan& p = *plan;
  const py::capsule owner(plan.release(), [](void* pointer) { delete static_cast<fc::Plan*>(pointer); });
  const auto flat = [&owner]<class T>(const std::vector<T>& values) {
    return py::array_t<T>(static_cast<py::ssize_t>(values.size()), values.data(), owner);
  };
  const auto grid = [&owner]<class T>(const std::vector<T>& values, py::ssize_t height, py::ssize_t width) {
    return py::array_t<T>({height, width}, values.data(), owner);
  };
  return py::make_tuple(flat(p.rows), flat(p.input_ids), flat(p.position_ids), flat(p.q_indptr), flat(p.kv_len),
                        grid(p.block_table, rows, width), flat(p.slot_mapping),
                        grid(p.copies, static_cast<py::ssize_t>(p.copies.size()) / 2, 2), flat(p.logit_index),
                        flat(p.sample_rows), flat(p.key), flat(p.position), flat(p.epoch));
}

py::dict counters(const Scheduler& scheduler) {
  using fc::Counters;
  static constexpr std::pair<const char*, int64_t Counters::*> kFields[] = {
      {"forwards", &Counters::forwards},       {"tokens", &Counters::tokens}, {"sampled", &Counters::sampled},
      {"catch_up", &Counters::catch_up},       {"cached", &Counters::cached}, {"handoffs", &Counters::handoffs},
      {"preemptions", &Counters::preemptions}, {"copies", &Counters::copies},
  };
  py::dict result;
  for (const auto& [name, field] : kFields) {
    py::list values;
    for (const Counters& c : scheduler.counters()) values.append(c.*field);
    result[name] = values;
  }
  return result;
}

template <class E>
E checked(const char* name, int64_t value, E last) {
  if (value < 0 || value > last) {
    throw std::invalid_argument(std::string(name) + ": got " + std::to_string(value) + ", need 0.." +
                                std::to_string(last));
  }
  return static_cast<E>(value);
}

int64_t add_policy(Scheduler& scheduler, int64_t kind, std::vector<int32_t> models, std::vector<double> cumulative,
                   const std::optional<Array<uint8_t>>& boundary, int32_t max_gap, int32_t first,
                   std::vector<int64_t> eos) {
  fc::Policy policy{checked("kind", kind, fc::kAsk),
                    std::move(models),
                    std::move(cumulative),
                    boundary.has_value(),
                    {},
                    max_gap,
                    first,
                    std::move(eos)};
  if (boundary) policy.boundary.assign(boundary->data(), boundary->data() + boundary->size());
  return scheduler.add_policy(std::move(policy));
}

py::tuple view(Scheduler& scheduler, int64_t i) {
  const fc::Row& row = scheduler.row(i);
  return py::make_tuple(copy(row.tokens(0, row.prompt_len)), copy(row.tokens(row.prompt_len, row.size())),
                        copy(std::span(row.author)));
}

py::tuple take(Scheduler& scheduler, int64_t i) {
  const fc::Row row = scheduler.take(i);
  py::list draws;
  for (const fc::Draw& d : row.draws) {
    draws.append(py::make_tuple(d.position, static_cast<int>(d.reason), static_cast<int>(d.writer)));
  }
  return py::make_tuple(copy(std::span(row.ids)), copy(std::span(row.author)), copy(std::span(row.logprob)), draws,
                        static_cast<int>(row.state));
}

}  // namespace

PYBIND11_MODULE(_scheduler, module) {
  module.doc() = "The compiled scheduler; fastcollab.scheduler is the same in Python.";
  const py::module_ oracle = py::module_::import("fastcollab.scheduler");
  const py::object plan_type = oracle.attr("Plan"), record_type = oracle.attr("Record");

  py::register_exception_translator([](std::exception_ptr error) {
    try {
      std::rethrow_exception(error);
    } catch (const fc::UnknownRow& e) {
      PyErr_SetObject(PyExc_KeyError, py::int_(e.id).ptr());
    } catch (const fc::PlanPending& e) {
      PyErr_SetString(PyExc_AssertionError, e.what());
    }
  });

  py::class_<Scheduler>(module, "Scheduler")
      .def(py::init([](const std::vector<int32_t>& num_blocks, int32_t block_size, int64_t token_budget,
                       std::optional<std::vector<double>> costs, bool prefix_cache) {
             if (!costs) costs.emplace(num_blocks.size(), 1.0);
             return std::make_unique<Scheduler>(num_blocks, block_size, token_budget, *costs, prefix_cache);
           }),
           "num_blocks"_a, "block_size"_a = 16, "token_budget"_a = 8192, "costs"_a = py::none(),
           "prefix_cache"_a = true)
      .def("add_policy", &add_policy, "kind"_a, "models"_a, "cumulative"_a = std::vector<double>{1.0},
           "boundary"_a = py::none(), "max_gap"_a = 0, "first"_a = -1, "eos"_a = py::tuple())
      .def(
          "add",
          [](Scheduler& s, const Array<int32_t>& prompt, int64_t key, int64_t group, int64_t max_new, int64_t policy,
             bool ignore_eos) {
            const auto ids = span(prompt);
            return s.add({ids.begin(), ids.end()}, static_cast<uint64_t>(key), group, max_new, policy, ignore_eos);
          },
          "prompt"_a, "key"_a, "group"_a, "max_new"_a, "policy"_a, "ignore_eos"_a = false)
      .def("ready", &Scheduler::ready, "m"_a)
      .def("next_models", &Scheduler::next_models)
      .def("asking", &Scheduler::asking)
      .def(
          "plan", [plan_type](Scheduler& s, int32_t m) { return plan_type(*arrays(s.plan(m))); }, "m"_a)
      .def(
          "commit",
          [](Scheduler& s, int32_t m, const Array<int64_t>& ids, const Array<float>& logprobs, double now) {
            return copy<int64_t>(s.commit(m, span(ids), span(logprobs), now));
          },
          "m"_a, "ids"_a, "logprobs"_a, "now"_a = 0.0)
      .def("set_author", &Scheduler::set_author, "i"_a, "writer"_a)
      .def("truncate", &Scheduler::truncate, "i"_a, "keep"_a)
      .def(
          "append_forced",
          [](Scheduler& s, int64_t i, const Array<int64_t>& ids, int64_t writer) {
            s.append_forced(i, span(ids), writer);
          },
          "i"_a, "ids"_a, "writer"_a)
      .def(
          "fork", [](Scheduler& s, int64_t i, int64_t key) { return s.fork(i, static_cast<uint64_t>(key)); }, "i"_a,
          "key"_a)
      .def(
          "finish", [](Scheduler& s, int64_t i, int64_t state) { s.finish(i, checked("finish", state, fc::kAbort)); },
          "i"_a, "state"_a = static_cast<int64_t>(fc::kAbort))
      .def("reset", &Scheduler::reset)
      .def(
          "take", [record_type](Scheduler& s, int64_t i) { return record_type(*take(s, i)); }, "i"_a)
      .def("invalidate", &Scheduler::invalidate, "m"_a)
      .def("unfinished", &Scheduler::unfinished)
      .def("view", &view, "i"_a)
      .def(
          "row_kv_len",
          [](Scheduler& s, int64_t i) {
            std::vector<int32_t> lengths;
            for (const fc::Held& held : s.row(i).held) lengths.push_back(held.kv_len);
            return lengths;
          },
          "i"_a)
      .def(
          "row_table", [](Scheduler& s, int64_t i, int32_t m) { return s.row(i).held.at(m).table; }, "i"_a, "m"_a)
      .def(
          "ref_counts", [](Scheduler& s, int32_t m) { return s.pool(m).refs(); }, "m"_a)
      .def(
          "free_blocks", [](Scheduler& s, int32_t m) { return s.pool(m).num_free(); }, "m"_a)
      .def_property_readonly("num_models", &Scheduler::num_models)
      .def_property_readonly("block_size", &Scheduler::block_size)
      .def_property_readonly("token_budget", &Scheduler::token_budget)
      .def_property_readonly("costs", &Scheduler::costs)
      .def_property_readonly("prefix_cache", &Scheduler::prefix_cache)
      .def_property_readonly("counters", &counters)
      .def_property_readonly("latencies", &Scheduler::latencies)
      .def("take_latencies", &Scheduler::take_latencies);
}
