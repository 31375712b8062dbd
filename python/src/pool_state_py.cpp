// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <fstream>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <paceline/error.hpp>
#include <paceline/plan/pool.hpp>
#include <paceline/plan/pool_ledger.hpp>

#include "bindings.hpp"

namespace py = pybind11;

namespace paceline::python {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// The value of a name, which are in the order of the values.
template <class Enum, std::size_t Count>
Enum value_of(const char* what, const std::array<const char*, Count>& names, const std::string& name) {
  std::string all;
  for (std::size_t k = 0; k < Count; ++k) {
    if (name == names[k]) return static_cast<Enum>(k);
    all += (k == 0 ? "" : ", ") + std::string(names[k]);
  }
  throw InvalidArgument(fmt::format("{} is '{}'; it must be one of {}.", what, name, all));
}

constexpr std::array<const char*, 4> kPriorities{"interactive", "normal", "batch", "background"};
constexpr std::array<const char*, 5> kResults{"completed", "failed", "out_of_memory", "device_lost", "given_up"};

/// Takes numbers as ids. Those that were never given fail where they are used.
plan::RunId run_of(std::uint64_t number) { return static_cast<plan::RunId>(number); }
std::optional<plan::JobId> job_of(const std::optional<std::uint64_t>& number) {
  return number ? std::optional(static_cast<plan::JobId>(*number)) : std::nullopt;
}

/// The decisions of a pool for a replay: what the users' functions answered is given.
class ReplayedPool {
 public:
  ReplayedPool(const std::string& placement, double decline, double probe_seconds, std::int64_t samples, double margin,
               double memory_margin_bytes, std::vector<double> patience)
      : pool_([&] {
          plan::PoolOptions options{.decline = decline,
                                    .probe_seconds = probe_seconds,
                                    .samples = samples,
                                    .margin = margin,
                                    .memory_margin_bytes = memory_margin_bytes,
                                    .patience = std::move(patience)};
          const bool custom = placement == "custom";
          options.placement = custom ? plan::Placement::custom : placement_of("", placement);
          if (custom) options.choose = [chosen = chosen_](const plan::PoolQuestion&) { return next(*chosen, {}); };
          return options;
        }()) {}

  void chose(const std::vector<std::optional<std::size_t>>& devices) {
    chosen_->assign(devices.begin(), devices.end());
  }

  void write_to(const std::string& path) { pool_.write_to(std::make_shared<std::ofstream>(path)); }

  std::size_t add_kind(std::string name, std::vector<std::int64_t> sizes, double max_delay_seconds, bool padded,
                       bool idempotent, std::int64_t queue_limit, std::string model, double resident_bytes,
                       double reload_seconds, double peak_bytes, double peak_bytes_per_item) {
    return pool_.add_kind({.name = std::move(name),
                           .sizes = std::move(sizes),
                           .max_delay_seconds = max_delay_seconds,
                           .padded = padded,
                           .idempotent = idempotent,
                           .queue_limit = queue_limit,
                           .model = std::move(model),
                           .resident_bytes = resident_bytes,
                           .reload_seconds = reload_seconds,
                           .peak_bytes = peak_bytes,
                           .peak_bytes_per_item = peak_bytes_per_item});
  }

  std::size_t add_need(const std::vector<bool>& accepted) {
    needs_.push_back(std::make_shared<std::deque<bool>>(accepted.begin(), accepted.end()));
    return pool_.add_need(
        {.accepts = [answers = needs_.back()](const plan::PoolDevice&) { return next(*answers, false); }});
  }

  std::size_t add_tenant(std::string name, double weight, std::int64_t devices, double memory_bytes) {
    return pool_.add_tenant(
        {.name = std::move(name), .weight = weight, .devices = devices, .memory_bytes = memory_bytes});
  }

  bool forget(std::size_t kind) { return pool_.forget(kind); }
  bool unload(std::size_t device, const std::string& model) { return pool_.unload(device, model); }

  std::string add_device(double now, std::string name, std::string device_class, std::vector<std::string> labels,
                         double weight, double memory_bytes, std::optional<std::size_t> shares_memory_of,
                         const std::vector<bool>& accepted) {
    for (std::size_t need = 0; need < std::min(needs_.size(), accepted.size()); ++need)
      needs_[need]->push_back(accepted[need]);
    return plan::ledger_json(pool_.add_device(now, {.name = std::move(name),
                                                    .device_class = std::move(device_class),
                                                    .labels = std::move(labels),
                                                    .weight = weight,
                                                    .memory_bytes = memory_bytes,
                                                    .shares_memory_of = shares_memory_of}));
  }

  std::pair<std::uint64_t, std::string> submit(double now, std::size_t kind, std::size_t need,
                                               const std::string& priority, double deadline_seconds,
                                               double not_before_seconds, double cost, std::int64_t gang,
                                               const std::vector<std::uint64_t>& after, std::size_t tenant,
                                               double charge, bool own, bool waits) {
    plan::PoolJob job{.kind = kind,
                      .need = need,
                      .priority = value_of<plan::Priority>("priority", kPriorities, priority),
                      .deadline_seconds = deadline_seconds,
                      .not_before_seconds = not_before_seconds,
                      .cost = cost,
                      .gang = gang,
                      .tenant = tenant,
                      .charge = charge,
                      .own = own,
                      .waits = waits};
    for (const std::uint64_t one : after) job.after.push_back(static_cast<plan::JobId>(one));
    plan::JobId id{};
    std::string decided = plan::ledger_json(pool_.submit(now, job, id));
    return {static_cast<std::uint64_t>(id), std::move(decided)};
  }
  [[nodiscard]] bool has_room(std::size_t kind, std::size_t tenant) const { return pool_.has_room(kind, tenant); }

  std::string finish(double now, std::uint64_t run, const std::string& result, double seconds) {
    const auto value = value_of<plan::RunResult>("result", kResults, result);
    return plan::ledger_json(pool_.finish(now, run_of(run), value, seconds));
  }
  std::string withdraw(double now, std::uint64_t run, const std::optional<std::uint64_t>& cancelled) {
    return plan::ledger_json(pool_.withdraw(now, run_of(run), job_of(cancelled)));
  }
  std::string cancel(double now, std::uint64_t job) {
    bool cancelled = false;
    return plan::ledger_json(pool_.cancel(now, static_cast<plan::JobId>(job), cancelled));
  }
  std::string retire(double now, std::size_t device, bool paused, double activation_seconds) {
    return plan::ledger_json(pool_.retire(now, device, paused, activation_seconds));
  }
  std::string restore(double now, std::size_t device) { return plan::ledger_json(pool_.restore(now, device)); }
  std::string lose(double now, std::size_t device) { return plan::ledger_json(pool_.lose(now, device)); }
  std::string measure(double now, std::size_t device, std::size_t kind, const std::pair<double, double>& model,
                      std::int64_t samples) {
    const auto line = plan::CostModel::affine(model.first, model.second);
    return plan::ledger_json(pool_.measure(now, device, kind, line, samples));
  }
  std::string loaded(double now, std::size_t kind, double seconds) {
    return plan::ledger_json(pool_.loaded(now, kind, seconds));
  }
  std::string tick(double now) { return plan::ledger_json(pool_.tick(now)); }

 private:
  template <class Answer>
  static Answer next(std::deque<Answer>& answers, Answer otherwise) {
    if (answers.empty()) return otherwise;
    const Answer answer = answers.front();
    answers.pop_front();
    return answer;
  }

  using Chosen = std::deque<std::optional<std::size_t>>;
  std::shared_ptr<Chosen> chosen_ = std::make_shared<Chosen>();
  std::vector<std::shared_ptr<std::deque<bool>>> needs_;  // what they have still to answer
  plan::PoolState pool_;
};

}  // namespace

plan::Placement placement_of(const char* call, const std::string& name) {
  constexpr std::array<const char*, 6> names{"auto",           "any", "round_robin", "least_outstanding", "weighted",
                                             "earliest_finish"};
  return value_of<plan::Placement>(fmt::format("{}placement", call).c_str(), names, name);
}

void bind_pool_state(py::module_& module) {
  module.attr("POOL_LEDGER_VERSION") = plan::kPoolLedgerVersion;
  py::class_<ReplayedPool>(module, "PoolState",
                           "The decisions of a pool, for replays of its ledger. Functions are its events, and return "
                           "what was decided as the ledger has it.")
      .def(py::init<const std::string&, double, double, std::int64_t, double, double, std::vector<double>>(),
           py::kw_only(), py::arg("placement"), py::arg("decline"),
           py::arg("probe_seconds") = std::numeric_limits<double>::infinity(), py::arg("samples"), py::arg("margin"),
           py::arg("memory_margin_bytes"), py::arg("patience"))
      .def("chose", &ReplayedPool::chose, py::arg("devices"),
           "What the user's placement answers during the next event.")
      .def("write_to", &ReplayedPool::write_to, py::arg("path"), "Write a ledger.")
      .def("add_kind", &ReplayedPool::add_kind, py::kw_only(), py::arg("name"), py::arg("sizes"),
           py::arg("max_delay_seconds") = 0.0, py::arg("padded") = false, py::arg("idempotent") = false,
           py::arg("queue_limit") = 0, py::arg("model") = "", py::arg("resident_bytes") = 0.0,
           py::arg("reload_seconds") = 0.0, py::arg("peak_bytes") = 0.0, py::arg("peak_bytes_per_item") = 0.0)
      .def("add_need", &ReplayedPool::add_need, py::kw_only(), py::arg("accepted"))
      .def("add_tenant", &ReplayedPool::add_tenant, py::kw_only(), py::arg("name"), py::arg("weight") = 1.0,
           py::arg("devices") = plan::PoolTenant{}.devices, py::arg("memory_bytes") = kInfinity)
      .def("forget", &ReplayedPool::forget, py::kw_only(), py::arg("kind"), "Whether it was.")
      .def("unload", &ReplayedPool::unload, py::kw_only(), py::arg("device"), py::arg("model"), "Whether it was there.")
      .def("add_device", &ReplayedPool::add_device, py::arg("now"), py::kw_only(), py::arg("name"),
           py::arg("device_class"), py::arg("labels"), py::arg("weight") = 0.0, py::arg("memory_bytes") = kInfinity,
           py::arg("shares_memory_of") = py::none(), py::arg("accepted") = std::vector<bool>{})
      .def("submit", &ReplayedPool::submit, py::arg("now"), py::kw_only(), py::arg("kind"), py::arg("need") = 0,
           py::arg("priority") = "normal", py::arg("deadline_seconds") = kInfinity, py::arg("not_before_seconds") = 0.0,
           py::arg("cost") = 1.0, py::arg("gang") = 1, py::arg("after") = std::vector<std::uint64_t>{},
           py::arg("tenant") = 0, py::arg("charge") = 0.0, py::arg("own") = false, py::arg("waits") = false,
           "The number of the job, and what was decided.")
      .def("has_room", &ReplayedPool::has_room, py::kw_only(), py::arg("kind"), py::arg("tenant") = 0,
           "Whether a job of this kind would be taken now, and not rejected for a full queue.")
      .def("finish", &ReplayedPool::finish, py::arg("now"), py::kw_only(), py::arg("run"), py::arg("result"),
           py::arg("seconds") = 0.0)
      .def("withdraw", &ReplayedPool::withdraw, py::arg("now"), py::kw_only(), py::arg("run"),
           py::arg("cancelled") = py::none())
      .def("cancel", &ReplayedPool::cancel, py::arg("now"), py::kw_only(), py::arg("job"))
      .def("retire", &ReplayedPool::retire, py::arg("now"), py::kw_only(), py::arg("device"), py::arg("paused") = false,
           py::arg("activation_seconds") = std::numeric_limits<double>::infinity())
      .def("restore", &ReplayedPool::restore, py::arg("now"), py::kw_only(), py::arg("device"))
      .def("lose", &ReplayedPool::lose, py::arg("now"), py::kw_only(), py::arg("device"))
      .def("measure", &ReplayedPool::measure, py::arg("now"), py::kw_only(), py::arg("device"), py::arg("kind"),
           py::arg("model"), py::arg("samples"))
      .def("loaded", &ReplayedPool::loaded, py::arg("now"), py::kw_only(), py::arg("kind"), py::arg("seconds"))
      .def("tick", &ReplayedPool::tick, py::arg("now"));
}

}  // namespace paceline::python
