// SPDX-License-Identifier: Apache-2.0
#include "engine/step/step_pieces.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <optional>

#include <paceline/error.hpp>

#include "engine/step/work_queue.hpp"
#include "plural.hpp"

namespace paceline::internal {

void check_pieces(const StepScript& script) {
  if (script.pieces.empty()) return;
  if (script.pieces.size() != script.claims.size()) {
    throw InvalidArgument(
        fmt::format("step: pieces for {} with claims for {}; give both, one list of each for each device.",
                    plural(script.pieces.size(), "device"), script.claims.size()));
  }
  for (std::size_t d = 0; d < script.pieces.size(); ++d) {
    auto piece = script.pieces[d].begin();
    const auto last = script.pieces[d].end();
    for (const MicroBatch& claim : script.claims[d]) {
      std::int64_t covered = claim.begin;
      for (; covered < claim.end && piece != last && piece->begin == covered && piece->end > covered; ++piece) {
        covered = piece->end;
      }
      if (covered == claim.end) continue;
      throw InvalidArgument(
          fmt::format("step: the pieces of device {} do not make up its claim [{}, {}) from item {} on; they must "
                      "follow one another and end where it ends.",
                      d, claim.begin, claim.end, covered));
    }
    if (piece != last) {
      throw InvalidArgument(
          fmt::format("step: the piece [{}, {}) of device {} is beyond its claims.", piece->begin, piece->end, d));
    }
  }
}

StepPieces::StepPieces(std::shared_ptr<const BatchPlan> plan, std::shared_ptr<MemoryCaps> caps,
                       std::shared_ptr<balance::SizeSearch> search, std::int64_t least_items,
                       std::vector<std::vector<MicroBatch>> script)
    : plan_(std::move(plan)),
      caps_(std::move(caps)),
      search_(std::move(search)),
      least_items_(least_items),
      script_(std::move(script)),
      devices_(plan_->shares.size()) {}

std::vector<StepPieces::Span> StepPieces::spans(const MicroBatch& claim) const {
  std::vector<Span> spans;
  if (!script_.empty()) {
    for (const MicroBatch& piece : script_[claim.device]) {
      if (claim.begin <= piece.begin && piece.end <= claim.end) spans.emplace_back(piece.begin, piece.end);
    }
    if (!spans.empty()) return spans;
  }
  if (search_ != nullptr) return search_->pieces(claim.begin, claim.end);
  return {{claim.begin, claim.end}};
}

bool StepPieces::run(const MicroBatch& claim, StepProgram& program, const WorkQueue& queue, MicroBatch& current) {
  using Clock = std::chrono::steady_clock;
  DeviceState& state = devices_[claim.device];
  bool excluded = search_ != nullptr && search_->on_trial();
  const auto run_piece = [&](Span piece) {
    if (queue.cancelled() && piece.first > claim.begin) throw Cancelled("the step was cancelled");
    current.begin = piece.first;
    current.end = piece.second;
    current.continues = piece.first > claim.begin;
    current.last = claim.last && piece.second == claim.end;
    if (!claim.items.empty()) {
      current.items = claim.items.subspan(static_cast<std::size_t>(piece.first - claim.begin),
                                          static_cast<std::size_t>(piece.second - piece.first));
    }
    excluded |= program.run(current);
    state.ran.push_back({.begin = piece.first, .end = piece.second, .device = claim.device});
  };
  const auto run_span = [&](Span span) {
    if (caps_ == nullptr || caps_->idle() || !script_.empty()) {
      run_piece(span);
    } else {
      run_in_memory(span, program, current, run_piece);
    }
  };
  std::int64_t span_count = 1;
  if (search_ != nullptr) {
    std::vector<balance::TimedPiece> timed;
    for (const Span& span : spans(claim)) {
      const Clock::time_point start = Clock::now();
      run_span(span);
      timed.push_back({span.second - span.first, std::chrono::duration<double>(Clock::now() - start).count()});
    }
    span_count = std::ssize(timed);
    state.timed.push_back(std::move(timed));
  } else if (!script_.empty()) {
    const std::vector<Span> scripted = spans(claim);
    for (const Span& span : scripted) run_span(span);
    span_count = std::ssize(scripted);
  } else {  // the usual case reads no clock and allocates nothing
    run_span({claim.begin, claim.end});
  }
  ++state.claims;
  state.spans += span_count;
  return excluded;
}

/// Cuts the span into pieces that fit, and measures sizes that are not known yet.
void StepPieces::run_in_memory(Span span, StepProgram& program, MicroBatch& current,
                               const std::function<void(Span)>& run_piece) {
  const DeviceId d = current.device;
  bool learned = false;
  const auto measure = [&](Span piece) {
    current.measure = true;
    run_piece(piece);
    current.measure = false;
    const std::optional<std::int64_t> bytes = program.memory_bytes(d);
    learned = !bytes || caps_->measured(d, *plan_, piece.first, piece.second, *bytes);
  };
  auto [begin, end] = span;
  while (const auto middle = caps_->end_to_measure(d, *plan_, begin, end, least_items_)) {
    measure({begin, *middle});
    begin = *middle;
    if (!learned) break;  // nothing could be measured, or only a known size
  }
  if (begin == end) return;
  for (const Span& piece : caps_->pieces(d, *plan_, begin, end, least_items_)) {
    if (caps_->wants_more(d, *plan_)) {
      measure(piece);
    } else {
      run_piece(piece);
    }
  }
}

std::vector<MicroBatch> StepPieces::ran() const {
  std::vector<MicroBatch> all;
  bool whole = true;
  for (const DeviceState& state : devices_) {
    whole = whole && std::ssize(state.ran) == state.claims;
    all.insert(all.end(), state.ran.begin(), state.ran.end());
  }
  return whole ? std::vector<MicroBatch>() : all;
}

std::int64_t StepPieces::count() const {
  std::int64_t count = 0;
  for (const DeviceState& state : devices_) count += std::ssize(state.ran);
  return count;
}

bool StepPieces::divided() const {
  return std::ranges::any_of(devices_, [](const DeviceState& state) { return state.spans > 1; });
}

void StepPieces::commit() const {
  if (search_ == nullptr) return;
  std::vector<balance::TimedClaims> timed;
  for (const DeviceState& state : devices_) timed.push_back(state.timed);
  search_->add(timed);
}

}  // namespace paceline::internal
