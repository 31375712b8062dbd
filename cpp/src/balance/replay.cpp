// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <istream>
#include <optional>
#include <string>
#include <utility>

#include <paceline/balance/ledger.hpp>
#include <paceline/error.hpp>

#include "balance/json.hpp"
#include "balance/ledger_format.hpp"

namespace paceline::balance {
namespace {

std::vector<double> numbers(const Json& json) {
  std::vector<double> out;
  for (const Json& item : json.array()) out.push_back(item.number());
  return out;
}

std::vector<std::int64_t> integers(const Json& json) {
  std::vector<std::int64_t> out;
  for (const Json& item : json.array()) out.push_back(item.integer());
  return out;
}

BalancerOptions read_options(const Json& json) {
  BalancerOptions options;
  options.policy = json["policy"].string();
  options.weights = numbers(json["weights"]);
  options.granularity = json["granularity"].integer();
  options.reduction_seconds = numbers(json["reduction_seconds"]);
  options.calibrate = json["calibrate"].boolean();
  options.proportional = json["proportional"].boolean();
  for (const Json& device : json["devices"].array()) {
    DeviceProfile profile;
    profile.name = device["name"].string();
    profile.device_class = device["device_class"].string();
    profile.limits.minimum = device["minimum"].integer();
    if (!device["maximum"].is_null()) profile.limits.maximum = device["maximum"].integer();
    profile.limits.may_be_zero = device["may_be_zero"].boolean();
    profile.limits.startup_seconds = device["startup_seconds"].number();
    options.devices.push_back(std::move(profile));
  }
  return options;
}

StepTimings read_timings(const Json& json) {
  StepTimings timings;
  timings.step_seconds = json["step_seconds"].number();
  if (json.has("reduction_seconds")) timings.reduction_seconds = json["reduction_seconds"].number();
  if (json.has("startup_seconds")) {
    for (const Json& seconds : json["startup_seconds"].array()) {
      timings.startup_seconds.push_back(seconds.is_null() ? std::nullopt : std::optional(seconds.number()));
    }
  }
  for (const Json& device : json["devices"].array()) {
    auto& runs = timings.devices.emplace_back();
    for (const Json& run : device.array()) {
      const std::vector<Json>& parts = run.array();
      if (parts.size() < 2 || parts.size() > 3)
        throw InvalidArgument("a micro-batch is [items, seconds] or [items, seconds, excluded]");
      runs.push_back({parts[0].integer(), parts[1].number(), parts.size() == 3 && parts[2].boolean()});
    }
  }
  return timings;
}

/// A replay in progress.
class Replay {
 public:
  void line(std::int64_t number, const Json& json) {
    if (!balancer_) return header(json);
    if (json.has("plan")) return plan(number, json["plan"]);
    if (json.has("record")) return record(json["record"]);
    if (json.has("retire")) return balancer_->retire(static_cast<std::size_t>(json["retire"]["device"].integer()));
    if (json.has("restore")) return balancer_->restore(static_cast<std::size_t>(json["restore"]["device"].integer()));
    if (json.has("least_items")) return balancer_->set_least_items(json["least_items"].integer());
    if (json.has("claims")) return;  // what ran, not what was decided
    throw InvalidArgument(
        "neither \"plan\" nor \"record\" nor \"retire\" nor \"restore\" nor \"least_items\" is there");
  }

  [[nodiscard]] bool started() const { return balancer_.has_value(); }

  ReplayResult finish() {
    result_.moves = balancer_->move_count();
    return std::move(result_);
  }

 private:
  void header(const Json& json) {
    const std::int64_t version = json["paceline_ledger"].integer();
    if (version != kLedgerVersion) {
      throw InvalidArgument(
          fmt::format("the ledger has version {}, this library reads version {}", version, kLedgerVersion));
    }
    balancer_.emplace(read_options(json["options"]));
  }

  void plan(std::int64_t number, const Json& json) {
    const StepPlan made = balancer_->next_plan(json["batch_size"].integer());
    const std::int64_t step = json["step"].integer();
    ++result_.plans;
    step_ = made.step;
    const auto differ = [&](std::string what) { result_.mismatches.push_back({number, step, std::move(what)}); };
    if (step != made.step) differ(fmt::format("step: the ledger says {}, replayed {}", step, made.step));
    const std::vector<std::int64_t> shares = integers(json["shares"]);
    if (shares != made.shares) {
      differ(fmt::format("shares: the ledger says [{}], replayed [{}]", fmt::join(shares, ", "),
                         fmt::join(made.shares, ", ")));
    }
    const bool moved = json["moved"].boolean();
    if (moved != made.moved) differ(fmt::format("moved: the ledger says {}, replayed {}", moved, made.moved));
    const double predicted = json["predicted_seconds"].number();
    if (predicted != made.predicted_seconds) {
      differ(fmt::format("predicted_seconds: the ledger says {}, replayed {}", predicted, made.predicted_seconds));
    }
  }

  void record(const Json& json) {
    const std::int64_t step = json["step"].integer();
    if (step != step_) throw InvalidArgument(fmt::format("a record of step {} after the plan of step {}", step, step_));
    balancer_->record(read_timings(json));
    ++result_.records;
  }

  std::optional<Balancer> balancer_;
  ReplayResult result_;
  std::int64_t step_ = -1;
};

}  // namespace

ReplayResult replay(std::istream& ledger) {
  Replay replay;
  std::string text;
  for (std::int64_t number = 1; std::getline(ledger, text); ++number) {
    try {
      replay.line(number, Json::parse(text));
    } catch (const InvalidArgument& error) {
      throw InvalidArgument(fmt::format("line {} of the ledger: {}", number, error.what()));
    }
  }
  if (!replay.started()) throw InvalidArgument("line 1 of the ledger: there is no header, the ledger is empty");
  return replay.finish();
}

}  // namespace paceline::balance
