// SPDX-License-Identifier: Apache-2.0
#include "engine/step/step_pieces.hpp"

#include <algorithm>
#include <chrono>
#include <optional>

#include <paceline/error.hpp>

#include "engine/step/claims.hpp"

namespace paceline::internal {

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

bool StepPieces::run(const MicroBatch& claim, StepProgram& program, const Claims& claims, MicroBatch& current) {
  using Clock = std::chrono::steady_clock;
  DeviceState& state = devices_[claim.device];
  bool excluded = search_ != nullptr && search_->on_trial();
  std::vector<balance::TimedPiece> timed;
  for (const Span& span : spans(claim)) {
    const Clock::time_point start = Clock::now();
    excluded |= run_span(claim, span, program, claims, current);
    timed.push_back({span.second - span.first, std::chrono::duration<double>(Clock::now() - start).count()});
  }
  state.timed.push_back(std::move(timed));
  return excluded;
}

bool StepPieces::run_span(const MicroBatch& claim, Span span, StepProgram& program, const Claims& claims,
                          MicroBatch& current) {
  const DeviceId d = claim.device;
  const auto run_one = [&](Span piece) { return run_piece(claim, piece, program, claims, current); };
  if (caps_->idle() || !script_.empty()) return run_one(span);
  bool excluded = false;
  bool learned = false;
  const auto measure = [&](Span piece) {
    current.measure = true;
    excluded |= run_one(piece);
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
  if (begin == end) return excluded;
  for (const Span& piece : caps_->pieces(d, *plan_, begin, end, least_items_)) {
    if (caps_->wants_more(d, *plan_)) {
      measure(piece);
    } else {
      excluded |= run_one(piece);
    }
  }
  return excluded;
}

bool StepPieces::run_piece(const MicroBatch& claim, Span piece, StepProgram& program, const Claims& claims,
                           MicroBatch& current) {
  if (claims.cancelled() && piece.first > claim.begin) throw Cancelled("the step was cancelled");
  current.begin = piece.first;
  current.end = piece.second;
  current.continues = piece.first > claim.begin;
  current.last = claim.last && piece.second == claim.end;
  if (!claim.items.empty()) {
    current.items = claim.items.subspan(static_cast<std::size_t>(piece.first - claim.begin),
                                        static_cast<std::size_t>(piece.second - piece.first));
  }
  const bool excluded = program.run(current);
  devices_[claim.device].ran.push_back({.begin = piece.first, .end = piece.second, .device = claim.device});
  return excluded;
}

std::vector<MicroBatch> StepPieces::ran() const {
  std::vector<MicroBatch> all;
  bool whole = true;
  for (const DeviceState& state : devices_) {
    whole = whole && state.ran.size() == state.timed.size();
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
  return std::any_of(devices_.begin(), devices_.end(), [](const DeviceState& state) {
    std::size_t pieces = 0;
    for (const std::vector<balance::TimedPiece>& claim : state.timed) pieces += claim.size();
    return pieces > 1;
  });
}

void StepPieces::commit() const {
  if (search_ == nullptr) return;
  std::vector<balance::TimedClaims> timed;
  for (const DeviceState& state : devices_) timed.push_back(state.timed);
  search_->add(timed);
}

}  // namespace paceline::internal
