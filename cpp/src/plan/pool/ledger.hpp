// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <paceline/plan/cost_model.hpp>
#include <paceline/plan/pool_types.hpp>

namespace paceline::plan {

/// Writes the lines that pool_ledger.hpp describes. Each is flushed, so that the ledger of a program that crashes is
/// whole.
class PoolLedger {
 public:
  explicit PoolLedger(std::shared_ptr<std::ostream> out) : out_(std::move(out)) {}

  /// Whether a line could not be written. None is written after it.
  [[nodiscard]] bool failed() const noexcept { return failed_; }

  void header(const PoolOptions& options);
  void add_kind(const PoolKind& kind);
  void add_tenant(const PoolTenant& tenant);
  void forget(std::size_t kind);
  void unload(std::size_t device, const std::string& model);
  /// `accepted`: by device.
  void add_need(const std::vector<char>& accepted);
  /// `accepted`: by need, without need 0.
  void add_device(double now, const PoolDevice& device, const std::vector<char>& accepted,
                  const PoolDecisions& decided);
  void submit(double now, const PoolJob& job, JobId id, const PoolDecisions& decided);
  void finish(double now, RunId run, RunResult result, double seconds, const PoolDecisions& decided);
  void withdraw(double now, RunId run, std::optional<JobId> cancelled, const PoolDecisions& decided);
  void cancel(double now, JobId job, const PoolDecisions& decided);
  void retire(double now, std::size_t device, bool paused, double activation_seconds, const PoolDecisions& decided);
  void restore(double now, std::size_t device, const PoolDecisions& decided);
  void lose(double now, std::size_t device, const PoolDecisions& decided);
  void measure(double now, std::size_t device, std::size_t kind, const CostModel& model, std::int64_t samples,
               const PoolDecisions& decided);
  void loaded(double now, std::size_t kind, double seconds, const PoolDecisions& decided);
  void tick(double now, const PoolDecisions& decided);

  /// An answer of the user's placement during the event that is written next.
  void chose(std::optional<std::size_t> device) { chosen_.push_back(device); }

 private:
  void line(const std::string& text);
  /// `more`: members beside the call.
  void event(double now, std::string_view call, const std::string& arguments, const PoolDecisions& decided,
             const std::string& more = "");

  std::shared_ptr<std::ostream> out_;
  std::vector<std::optional<std::size_t>> chosen_;
  bool failed_ = false;
};

}  // namespace paceline::plan
