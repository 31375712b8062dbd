// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include <paceline/balance/ledger.hpp>
#include <paceline/balance/size_search.hpp>
#include <paceline/engine/step_loop.hpp>

#include "engine/loop/health_log.hpp"
#include "engine/loop/item_work.hpp"
#include "engine/loop/planner.hpp"
#include "engine/step/memory_caps.hpp"
#include "engine/step/short_pieces.hpp"
#include "engine/unsettled.hpp"

namespace paceline {

/// What a StepLoop keeps from step to step: it plans batches, and notes what committed steps took.
struct StepLoop::State {
  static constexpr std::size_t kMostPending = 2;  // how many steps the caller may be ahead of the devices

  State(const DeviceGroup& the_group, StepLoopOptions the_options);

  /// @throws InvalidArgument for options that do not go together.
  static void check(const StepLoopOptions& options);

  [[nodiscard]] bool corrects() const { return options.corrections.value_or(!asynchronous); }
  /// Whether devices take over others' micro-batches where the shares run in pieces.
  [[nodiscard]] bool helps() const { return !overlaps || options.corrections == true; }

  [[nodiscard]] std::int64_t least_items() const {
    return options.micro_batch > 0 ? std::min(options.least_items, options.micro_batch) : options.least_items;
  }

  /// The next plan. Waits for the times of earlier steps, except if the plan would be the last one again.
  std::shared_ptr<const BatchPlan> next_plan(std::int64_t batch_size, const BatchKind& kind);
  std::shared_ptr<const BatchPlan> next_plan(std::span<const double> costs);

  /// Whether micro-batches of this batch may have any size.
  [[nodiscard]] bool any_size(const BatchPlan& batch) const;
  /// The search for sizes that this plan's kind of batch has; null: claims are not cut to find a size.
  std::shared_ptr<balance::SizeSearch> search_for(const BatchPlan& batch);
  /// What cuts this kind of batch into short pieces; null: nothing does.
  std::shared_ptr<internal::ShortPieces> shorter_for(const BatchPlan& batch);

  template <class Value>
  void set(Value StepLoopOptions::* option, Value value) {
    StepLoopOptions changed = options;
    changed.*option = value;
    check(changed);
    options = std::move(changed);
  }

  void change_devices(const std::function<void(balance::Balancer&)>& change);

  void note(const Step& done);
  /// Unsettled::settle()
  void collect(std::size_t most);
  /// Unsettled::look()
  void look();
  void note_events(const BatchPlan& ran_by, const StepRecord& done);

  DeviceGroup group;
  bool asynchronous;  // any of the devices
  bool overlaps;      // several of them are, so that gradients are summed while devices compute
  StepLoopOptions options;
  std::vector<std::int64_t> run_ahead;
  // The times of batches with costs and of those without cannot be compared, so each kind has a balancer of its own.
  // Steps of both kinds may alternate.
  internal::Planner alike;
  internal::Planner by_cost;  // splits units of work instead of items
  internal::ItemWork work;
  internal::Planner* last = &alike;               // the one that made the last plan
  std::shared_ptr<balance::LedgerWriter> ledger;  // of both planners
  std::shared_ptr<const BatchPlan> plan;          // the last one; null where the devices have changed since
  std::shared_ptr<internal::MemoryCaps> caps;
  // By size and speed number of the batch, least recently used first.
  std::vector<std::pair<std::pair<std::int64_t, std::uint64_t>, std::shared_ptr<balance::SizeSearch>>> searches;
  std::shared_ptr<balance::SizeSearch> last_search;
  double longest_seconds = 0.0;  // of a micro-batch whose size is free; 0: any
  std::vector<std::pair<std::uint64_t, std::shared_ptr<internal::ShortPieces>>> short_pieces;  // as `searches`
  observe::MetricsRecorder metrics;
  observe::History history;
  internal::HealthLog health;
  observe::EventRing events;
  internal::Unsettled<std::shared_ptr<const Step>> pending;
  StepRecord record;
  std::chrono::steady_clock::time_point origin;
  std::mutex cancel_mutex;
  std::weak_ptr<Step> running;
};

}  // namespace paceline
