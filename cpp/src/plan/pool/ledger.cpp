// SPDX-License-Identifier: Apache-2.0
#include "plan/pool/ledger.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <array>
#include <ranges>
#include <type_traits>

#include <paceline/plan/pool.hpp>
#include <paceline/plan/pool_ledger.hpp>

#include "json.hpp"
#include "plan/pool/state.hpp"
#include "refuse.hpp"

namespace paceline::plan {
namespace {

constexpr std::array kPlacements{"auto",  "any", "round_robin", "least_outstanding", "weighted", "earliest_finish",
                                 "custom"};
constexpr std::array kPriorities{"interactive", "normal", "batch", "background"};
constexpr std::array kResults{"completed", "failed", "out_of_memory", "device_lost", "given_up"};
constexpr std::array kOutcomes{"completed", "failed", "rejected", "expired", "cancelled"};
constexpr std::array kReasons{"none",       "queue_full", "deadline",      "no_device",   "on_request",
                              "dependency", "error",      "out_of_memory", "device_lost", "faster_devices",
                              "filling",    "reserved",   "memory",        "foreground",  "chosen_otherwise",
                              "quota"};

template <class Names, class Enum>
std::string name_in(const Names& names, Enum value) {
  return fmt::format("\"{}\"", names[static_cast<std::size_t>(value)]);
}

std::uint64_t number(JobId id) { return static_cast<std::uint64_t>(id); }
std::uint64_t number(RunId id) { return static_cast<std::uint64_t>(id); }

template <class Values, class Text>
std::string list(const Values& values, const Text& text) {
  std::string out = "[";
  for (const auto& value : values) out += (out.size() > 1 ? ", " : "") + text(value);
  return out + "]";
}

std::string bools(const std::vector<char>& values) {
  return list(values, [](char one) { return std::string(one != 0 ? "true" : "false"); });
}

std::string ids(const std::vector<JobId>& values) {
  return list(values, [](JobId one) { return fmt::to_string(number(one)); });
}

/// Members of a JSON object. Those that have their default are left out.
class Members {
 public:
  Members& add(std::string_view name, const std::string& json) {
    text_ += fmt::format("{}\"{}\": {}", text_.empty() ? "" : ", ", name, json);
    return *this;
  }
  template <class Value>
    requires std::is_arithmetic_v<Value>
  Members& add(std::string_view name, Value value) {
    if constexpr (std::is_same_v<Value, double>) {
      return add(name, json_number(value));
    } else {
      return add(name, fmt::to_string(value));  // "true" and "false", too
    }
  }
  template <class Value>
  Members& unless(std::string_view name, const Value& value, const Value& usual) {
    if (value == usual) return *this;
    if constexpr (std::is_same_v<Value, std::string>) {
      return add(name, json_quoted(value));
    } else {
      return add(name, value);
    }
  }
  [[nodiscard]] const std::string& text() const noexcept { return text_; }

 private:
  std::string text_;
};

std::string end_json(const PoolEnd& end) {
  const std::string cause = end.cause ? fmt::format(", {}", number(*end.cause)) : "";
  return fmt::format("[{}, {}, {}{}]", number(end.job), name_in(kOutcomes, end.outcome), name_in(kReasons, end.reason),
                     cause);
}

std::string start_json(const PoolStart& start) {
  Members members;
  members.add("run", number(start.run))
      .add("devices", fmt::format("[{}]", fmt::join(start.devices, ", ")))
      .add("jobs", ids(start.jobs))
      .add("kind", start.kind)
      .add("cost", start.cost)
      .add("predicted_seconds", start.predicted_seconds)
      .unless("load_seconds", start.load_seconds, 0.0);
  if (!start.evict.empty()) {
    members.add("evict", list(start.evict, [](const PoolEviction& one) {
                  return fmt::format("[{}, {}]", one.device, json_quoted(one.model));
                }));
  }
  return "{" + members.unless("probe", start.probe, false).text() + "}";
}

std::string decline_json(const PoolDecline& one) {
  return fmt::format("[{}, {}, {}, {}, {}]", one.device, one.kind, name_in(kReasons, one.reason),
                     json_number(one.waiting), json_number(one.threshold));
}

}  // namespace

std::string ledger_json(const PoolDecisions& decisions) {
  Members members;
  if (!decisions.ends.empty()) members.add("ends", list(decisions.ends, end_json));
  if (!decisions.starts.empty()) members.add("starts", list(decisions.starts, start_json));
  if (!decisions.declines.empty()) members.add("declines", list(decisions.declines, decline_json));
  members.unless("wake_seconds", decisions.wake_seconds, kNever);
  return members.text().empty() ? "" : "{" + members.text() + "}";
}

// Flushed: a program that crashes is the one whose decisions somebody wants to see.
void PoolLedger::line(const std::string& text) {
  if (failed_) return;
  *out_ << '{' << text << "}\n" << std::flush;
  failed_ = !*out_;
}

void PoolLedger::event(double now, std::string_view call, const std::string& arguments, const PoolDecisions& decided,
                       const std::string& more) {
  std::string text = fmt::format(R"("at": {}, "{}": {{{}}}{})", now, call, arguments, more);
  if (!chosen_.empty()) {
    text += ", \"chosen\": " + list(chosen_, [](const std::optional<std::size_t>& one) {
              return one ? fmt::to_string(*one) : std::string("null");
            });
    chosen_.clear();
  }
  if (const std::string json = ledger_json(decided); !json.empty()) text += ", \"decided\": " + json;
  line(text);
}

void PoolLedger::header(const PoolOptions& options) {
  Members members;
  members.add("placement", name_in(kPlacements, options.placement))
      .add("decline", options.decline)
      .unless("probe_seconds", options.probe_seconds, kNever)
      .add("samples", options.samples)
      .add("margin", options.margin)
      .add("memory_margin_bytes", options.memory_margin_bytes)
      .add("patience", fmt::format("[{}]", fmt::join(options.patience, ", ")));
  line(fmt::format(R"("paceline_pool_ledger": {}, "options": {{{}}})", kPoolLedgerVersion, members.text()));
}

void PoolLedger::add_kind(const PoolKind& kind) {
  const PoolKind usual;
  Members members;
  members.add("name", json_quoted(kind.name))
      .add("sizes", fmt::format("[{}]", fmt::join(kind.sizes, ", ")))
      .unless("max_delay_seconds", kind.max_delay_seconds, usual.max_delay_seconds)
      .unless("padded", kind.padded, usual.padded)
      .unless("idempotent", kind.idempotent, usual.idempotent)
      .unless("queue_limit", kind.queue_limit, usual.queue_limit)
      .unless("model", kind.model, usual.model)
      .unless("resident_bytes", kind.resident_bytes, usual.resident_bytes)
      .unless("reload_seconds", kind.reload_seconds, usual.reload_seconds)
      .unless("peak_bytes", kind.peak_bytes, usual.peak_bytes)
      .unless("peak_bytes_per_item", kind.peak_bytes_per_item, usual.peak_bytes_per_item);
  line(fmt::format(R"("add_kind": {{{}}})", members.text()));
}

void PoolLedger::add_tenant(const PoolTenant& tenant) {
  const PoolTenant usual;
  Members members;
  members.add("name", json_quoted(tenant.name))
      .unless("weight", tenant.weight, usual.weight)
      .unless("devices", tenant.devices, usual.devices)
      .unless("memory_bytes", tenant.memory_bytes, usual.memory_bytes);
  line(fmt::format(R"("add_tenant": {{{}}})", members.text()));
}

void PoolLedger::forget(std::size_t kind) {
  line(fmt::format(R"("forget": {{{}}})", Members().add("kind", kind).text()));
}

void PoolLedger::unload(std::size_t device, const std::string& model) {
  line(fmt::format(R"("unload": {{{}}})", Members().add("device", device).add("model", json_quoted(model)).text()));
}

void PoolLedger::add_need(const std::vector<char>& accepted) {
  line(fmt::format(R"("add_need": {{"accepted": {}}})", bools(accepted)));
}

void PoolLedger::add_device(double now, const PoolDevice& device, const std::vector<char>& accepted,
                            const PoolDecisions& decided) {
  const PoolDevice usual;
  Members members;
  members.add("name", json_quoted(device.name))
      .add("device_class", json_quoted(device.device_class))
      .add("labels", list(device.labels, json_quoted))
      .unless("weight", device.weight, usual.weight)
      .unless("memory_bytes", device.memory_bytes, usual.memory_bytes);
  if (device.shares_memory_of) members.add("shares_memory_of", *device.shares_memory_of);
  event(now, "add_device", members.add("accepted", bools(accepted)).text(), decided);
}

void PoolLedger::submit(double now, const PoolJob& job, JobId id, const PoolDecisions& decided) {
  const PoolJob usual;
  Members members;
  members.add("kind", job.kind).unless("need", job.need, usual.need);
  if (job.priority != usual.priority) members.add("priority", name_in(kPriorities, job.priority));
  members.unless("deadline_seconds", job.deadline_seconds, usual.deadline_seconds)
      .unless("not_before_seconds", job.not_before_seconds, usual.not_before_seconds)
      .unless("cost", job.cost, usual.cost)
      .unless("gang", job.gang, usual.gang)
      .unless("tenant", job.tenant, usual.tenant)
      .unless("charge", job.charge, usual.charge)
      .unless("own", job.own, usual.own)
      .unless("waits", job.waits, usual.waits);
  if (!job.after.empty()) members.add("after", ids(job.after));
  event(now, "submit", members.text(), decided, fmt::format(R"(, "job": {})", number(id)));
}

void PoolLedger::finish(double now, RunId run, RunResult result, double seconds, const PoolDecisions& decided) {
  Members members;
  members.add("run", number(run)).add("result", name_in(kResults, result));
  if (result == RunResult::completed) members.add("seconds", seconds);
  event(now, "finish", members.text(), decided);
}

void PoolLedger::withdraw(double now, RunId run, std::optional<JobId> cancelled, const PoolDecisions& decided) {
  Members members;
  members.add("run", number(run));
  if (cancelled) members.add("cancelled", number(*cancelled));
  event(now, "withdraw", members.text(), decided);
}

void PoolLedger::cancel(double now, JobId job, const PoolDecisions& decided) {
  event(now, "cancel", Members().add("job", number(job)).text(), decided);
}

void PoolLedger::retire(double now, std::size_t device, bool paused, double activation_seconds,
                        const PoolDecisions& decided) {
  Members members;
  members.add("device", device)
      .unless("paused", paused, false)
      .unless("activation_seconds", activation_seconds, kNever);
  event(now, "retire", members.text(), decided);
}

void PoolLedger::restore(double now, std::size_t device, const PoolDecisions& decided) {
  event(now, "restore", Members().add("device", device).text(), decided);
}

void PoolLedger::lose(double now, std::size_t device, const PoolDecisions& decided) {
  event(now, "lose", Members().add("device", device).text(), decided);
}

void PoolLedger::measure(double now, std::size_t device, std::size_t kind, const CostModel& model, std::int64_t samples,
                         const PoolDecisions& decided) {
  Members members;
  members.add("device", device)
      .add("kind", kind)
      .add("model", fmt::format("[{}, {}]", model.fixed_seconds(), model.per_item_seconds()))
      .add("samples", samples);
  event(now, "measure", members.text(), decided);
}

void PoolLedger::loaded(double now, std::size_t kind, double seconds, const PoolDecisions& decided) {
  event(now, "loaded", Members().add("kind", kind).add("seconds", seconds).text(), decided);
}

void PoolLedger::tick(double now, const PoolDecisions& decided) { event(now, "tick", "", decided); }

void PoolState::write_to(std::shared_ptr<std::ostream> out) {
  State& s = *state_;
  require(!s.begun, "a ledger has to be attached before the first job, and before a device is retired or measured");
  s.ledger = std::make_shared<PoolLedger>(std::move(out));
  s.ledger->header(s.options);
  for (const State::Kind& kind : s.kinds) s.ledger->add_kind(kind.spec);
  for (std::size_t kind = 0; kind < s.kinds.size(); ++kind) {
    if (s.kinds[kind].forgotten) s.ledger->forget(kind);
  }
  for (const Tenant& tenant : s.tenants | std::views::drop(1)) s.ledger->add_tenant(tenant.spec);
  for (const State::Device& device : s.devices) s.ledger->add_device(s.last_now, device.spec, {}, {});
  for (const std::vector<char>& accepted : s.accepted | std::views::drop(1)) s.ledger->add_need(accepted);
}

bool PoolState::begun() const noexcept { return state_->begun; }
bool PoolState::ledger_failed() const noexcept { return state_->ledger != nullptr && state_->ledger->failed(); }
bool PoolState::writes_ledger() const noexcept { return state_->ledger != nullptr && !ledger_failed(); }

}  // namespace paceline::plan
