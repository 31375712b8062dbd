// SPDX-License-Identifier: Apache-2.0
#include "engine/step/step_pieces.hpp"

#include <algorithm>
#include <optional>
#include <utility>

namespace paceline::internal {

StepPieces::StepPieces(std::shared_ptr<const BatchPlan> plan, std::shared_ptr<MemoryCaps> caps,
                       std::shared_ptr<balance::SizeSearch> search, std::int64_t least_items,
                       std::vector<std::vector<MicroBatch>> script)
    : plan_(std::move(plan)),
      caps_(std::move(caps)),
      search_(std::move(search)),
      least_items_(least_items),
      devices_(plan_->devices) {
  if (!script.empty()) script_ = {plan_->devices, std::move(script)};
}

void StepPieces::shorten(std::shared_ptr<ShortPieces> shorter, double seconds) {
  shorter_ = std::move(shorter);
  seconds_ = seconds;
}

std::vector<StepPieces::Span> StepPieces::spans(const MicroBatch& claim) const {
  std::vector<Span> spans;
  if (scripted()) {
    for (const MicroBatch& piece : script_[claim.device]) {
      if (claim.begin <= piece.begin && piece.end <= claim.end) spans.emplace_back(piece.begin, piece.end);
    }
    if (!spans.empty()) return spans;
  }
  if (shorter_ != nullptr) {
    const std::optional<std::int64_t> most = search_ == nullptr ? std::nullopt : search_->size();
    return shorter_->pieces(claim.device, claim.begin, claim.end, seconds_, most);
  }
  if (search_ != nullptr) return search_->pieces(claim.begin, claim.end);
  return {{claim.begin, claim.end}};
}

bool StepPieces::on_trial() const { return searches() && search_->on_trial(); }

void StepPieces::begin(const MicroBatch& claim) {
  DeviceState& state = devices_[claim.device];
  state.claim = claim;
  state.cuts.clear();
  state.rest = {claim.begin, claim.begin};
  state.spans_left.clear();
  if (search_ == nullptr && shorter_ == nullptr &&
      !scripted()) {  // the usual case allocates nothing after the first claim
    state.spans_left.emplace_back(claim.begin, claim.end);
  } else {
    for (const Span& span : spans(claim)) state.spans_left.push_back(span);
    std::ranges::reverse(state.spans_left);
  }
  state.spans += std::ssize(state.spans_left);
  if (searches()) state.timed.emplace_back();
}

std::optional<MicroBatch> StepPieces::next(DeviceId device) {
  DeviceState& state = devices_[device];
  if (state.cuts.empty() && state.rest.first == state.rest.second) {
    if (state.spans_left.empty()) {
      ++state.claims;
      return std::nullopt;
    }
    state.rest = state.spans_left.back();
    state.spans_left.pop_back();
    state.learns = true;
    if (searches()) state.timed.back().push_back({state.rest.second - state.rest.first, 0.0});
  }
  const MicroBatch& claim = state.claim;
  MicroBatch piece = claim;
  const Span span = cut(state, piece.measure);
  piece.begin = span.first;
  piece.end = span.second;
  piece.continues = piece.begin > claim.begin;
  piece.last = claim.last && piece.end == claim.end;
  if (!claim.items.empty()) {
    piece.items = claim.items.subspan(static_cast<std::size_t>(piece.begin - claim.begin),
                                      static_cast<std::size_t>(piece.size()));
  }
  return piece;
}

/// The next piece of the span: one whose memory is to be measured, as long as that is not known, then pieces that fit.
StepPieces::Span StepPieces::cut(DeviceState& state, bool& measured) {
  const DeviceId d = state.claim.device;
  auto& [begin, end] = state.rest;
  state.probing = false;
  if (caps_ == nullptr || caps_->idle() || scripted()) return std::exchange(state.rest, {end, end});
  if (state.cuts.empty()) {
    if (state.learns) {
      if (const auto middle = caps_->end_to_measure(d, *plan_, begin, end, least_items_)) {
        measured = state.probing = true;
        return {std::exchange(begin, *middle), *middle};
      }
    }
    state.cuts = caps_->pieces(d, *plan_, begin, end, least_items_);
    std::ranges::reverse(state.cuts);
    begin = end;
  }
  const Span piece = state.cuts.back();
  state.cuts.pop_back();
  measured = caps_->wants_more(d, *plan_);
  return piece;
}

void StepPieces::measure(const MicroBatch& piece, StepProgram& program) {
  if (!piece.measure) return;
  DeviceState& state = devices_[piece.device];
  const std::optional<std::int64_t> bytes = program.memory_bytes(piece.device);
  const bool learned = !bytes || caps_->measured(piece.device, *plan_, piece.begin, piece.end, *bytes);
  if (state.probing) state.learns = learned;  // else nothing could be measured, or only a known size
}

void StepPieces::ran(const MicroBatch& piece, double seconds, bool evidence) {
  DeviceState& state = devices_[piece.device];
  state.ran.push_back({.begin = piece.begin, .end = piece.end, .device = piece.device});
  if (searches()) state.timed.back().back().seconds += seconds;
  if (shorter_ != nullptr && evidence) shorter_->ran(piece.device, piece.size(), seconds);
}

std::vector<MicroBatch> StepPieces::ran() const {
  std::vector<MicroBatch> all;
  bool whole = true;
  for (const auto& [id, state] : devices_) {
    whole = whole && std::ssize(state.ran) == state.claims;
    all.insert(all.end(), state.ran.begin(), state.ran.end());
  }
  return whole ? std::vector<MicroBatch>() : all;
}

std::int64_t StepPieces::count() const {
  std::int64_t count = 0;
  for (const auto& [id, state] : devices_) count += std::ssize(state.ran);
  return count;
}

bool StepPieces::divided() const {
  return std::ranges::any_of(devices_, [](const auto& entry) { return entry.value.spans > 1; });
}

void StepPieces::commit() const {
  if (!searches()) return;
  std::vector<balance::TimedClaims> timed;
  for (const auto& [id, state] : devices_) timed.push_back(state.timed);
  search_->add(timed);
}

}  // namespace paceline::internal
