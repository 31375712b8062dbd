// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <span>
#include <string>
#include <utility>

#include "balance/balancer_state.hpp"
#include "plural.hpp"
#include "refuse.hpp"

namespace paceline::balance {
namespace {

constexpr std::size_t kMovesShown = 3;
constexpr double kNotable = 0.02;  // smaller changes of speed are not worth words

/// How steps changed with a move.
std::string steps_after(const MoveReport& move) {
  return fmt::format("they were {:.1f} % {}, {} the noise of {:.1f} %", 100.0 * std::abs(move.measured_gain),
                     move.measured_gain < 0.0 ? "longer" : "shorter",
                     std::abs(move.measured_gain) > move.resolution ? "beyond" : "within", 100.0 * move.resolution);
}

std::string outcome(const MoveReport& move) {
  switch (move.outcome) {
    case MoveOutcome::pending:
      return "not yet judged";
    case MoveOutcome::overtaken:
      return "not judged: a speed or the shares changed before 8 steps had run";
    case MoveOutcome::unjudged:
      return "not judged: nothing comparable ran before it";
    case MoveOutcome::kept:
      return fmt::format("{}: kept", steps_after(move));
    case MoveOutcome::taken_back:
      return fmt::format("{}: taken back", steps_after(move));
  }
  return {};
}

std::string device_line(const DeviceReport& device) {
  if (device.retired) return fmt::format("  {}: retired, gets no work\n", device.name);
  const std::string late = device.startup_seconds > 0.0 ? fmt::format("; it starts {:.3g} ms after the first device",
                                                                      1e3 * device.startup_seconds)
                                                        : "";
  if (!device.measured) {
    return fmt::format("  {}: share {}, never measured; taken to be as fast as the fastest that was{}\n", device.name,
                       device.share, late);
  }
  const std::string equal =
      device.equals > 1 ? fmt::format(", no difference seen to {}", plural(device.equals - 1, "other")) : "";
  const std::string idle = device.share == 0 ? "; without work it is not measured, only probed now and then" : "";
  const std::int64_t seen = device.change_points + device.drifts;
  std::string changes =
      seen == 0 ? "no change of speed seen"
                : fmt::format("its speed changed {}, last at step {}", plural(seen, "time"), device.since_step);
  if (device.slowdown > 1.0 + kNotable) {
    changes += fmt::format(": {:.2f} times slower than before it", device.slowdown);
    if (device.regain > 0.0)
      changes += fmt::format(", without which steps would be {:.1f} % shorter", 100.0 * device.regain);
  } else if (device.slowdown > 0.0 && device.slowdown < 1.0 - kNotable) {
    changes += fmt::format(": {:.2f} times faster than before it", 1.0 / device.slowdown);
  }
  return fmt::format(
      "  {}: share {}, speed {:.2f} of the fastest {} (+-{:.1f} %{}), noise {:.1f} %, {} of evidence, {}{}{}\n",
      device.name, device.share, device.speed, device.device_class, 100.0 * device.error, equal, 100.0 * device.noise,
      plural(device.samples, "step"), changes, late, idle);
}

/// So many items, or whatever else batches count.
std::string amount(std::int64_t count, const std::string& unit) {
  return unit == "items" ? plural(count, "item") : fmt::format("{} {}", count, unit);
}

/// What the timings say about the fixed part of each class.
std::string shapes(const BalanceReport& report) {
  std::map<std::string, const DeviceReport*> classes;
  for (const DeviceReport& device : report.devices) {
    if (device.measured) classes.try_emplace(device.device_class, &device);
  }
  std::string out;
  for (const auto& [name, device] : classes) {
    const double whole = device->fixed_seconds + device->per_item_seconds * device->reference_items;
    out += fmt::format("  {}: {:.0f} % +-{:.0f} % of the time of {} does not depend on the number of {}{}\n", name,
                       100.0 * device->fixed_seconds / whole, 100.0 * device->fixed_error,
                       amount(std::llround(device->reference_items), report.unit), report.unit,
                       device->fixed_error > 0.1 ? " (little known: hardly more than one size was seen)" : "");
  }
  return out;
}

/// The report in words. If a cause of a device's slowness is given, it follows the device's line.
std::string describe(const BalanceReport& report, std::int64_t batch_size, std::span<const std::string> causes) {
  std::string out = fmt::format("{} balance, {} measured, {}", report.policy, plural(report.steps, "step"),
                                plural(report.moves, "move"));
  if (report.taken_back > 0) out += fmt::format(", {} taken back", report.taken_back);
  const std::string multiples = report.granularity > 1 ? fmt::format(", in multiples of {}", report.granularity) : "";
  const std::string unit = report.unit == "items" ? "" : " " + report.unit;
  out += batch_size > 0 ? fmt::format("; shares of a batch of {}{}, as planned{}\n", batch_size, unit, multiples)
                        : "; nothing planned yet\n";
  for (std::size_t i = 0; i < report.devices.size(); ++i) {
    const DeviceReport& device = report.devices[i];
    out += device_line(device);
    if (device.lent_part > 0.0) {
      out += fmt::format("    {} lends {:.0f} % of its time to requests{}\n", device.name, 100.0 * device.lent_part,
                         report.policy == "auto" ? ", which its share counts" : "");
    }
    if (i < causes.size() && !causes[i].empty()) out += fmt::format("    what may slow it: {}\n", causes[i]);
  }
  const std::string known = shapes(report);
  if (known.empty()) {
    return out + (report.steps == 0 ? "Nothing is measured yet, so nothing is known about the devices.\n"
                                    : "Only first runs of a size so far, whose times say nothing of the devices.\n");
  }
  out += known;
  if (!report.last_reason.empty()) out += fmt::format("Last decision: {}.\n", report.last_reason);
  const std::size_t shown = std::min(kMovesShown, report.recent_moves.size());
  if (shown > 0 && std::cmp_less(shown, report.moves)) {
    out += fmt::format("The last {} of {} moves:\n", shown, report.moves);
  }
  for (std::size_t i = report.recent_moves.size() - shown; i < report.recent_moves.size(); ++i) {
    const MoveReport& move = report.recent_moves[i];
    out += fmt::format("Move at step {}: [{}] to [{}], to make steps {:.1f} % shorter; {}.\n", move.step,
                       fmt::join(move.from, ", "), fmt::join(move.to, ", "), 100.0 * move.promised_gain, outcome(move));
  }
  out += fmt::format("The best split for the measured speeds would make steps {:.2f} % shorter",
                     100.0 * report.possible_gain);
  if (report.policy == "auto") {
    out += report.steps < report.firm_until_step
               ? fmt::format("; no move before step {}, because one was taken back", report.firm_until_step)
               : fmt::format("; a move must promise more than {:.2f} %", 100.0 * report.required_gain);
  }
  return out + ".\n";
}

}  // namespace

std::string Balancer::explain(std::span<const std::string> causes) const {
  if (!causes.empty() && causes.size() != state_->options.devices.size()) {
    refuse("explain: {} causes for {} devices; give one for each, or none", causes.size(),
           state_->options.devices.size());
  }
  std::string text = describe(report(), state_->usual ? state_->usual->batch_size : 0, causes);
  if (state_->ledger && state_->ledger->failed()) {
    text +=
        "The ledger could not be written to its end (is the disk full?): what was written replays, the rest is lost.\n";
  }
  return text;
}

}  // namespace paceline::balance
