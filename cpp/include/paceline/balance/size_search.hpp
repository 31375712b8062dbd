// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <paceline/export.hpp>

namespace paceline::balance {

/// A part of a claim that ran.
struct TimedPiece {
  std::int64_t items = 0;
  double seconds = 0.0;
};

/// What a device ran in a step, claim by claim, each in its pieces.
using TimedClaims = std::vector<std::vector<TimedPiece>>;

/// Items [begin, end) in equal pieces of about `size` items, at most half as many again.
[[nodiscard]] PACELINE_API std::vector<std::pair<std::int64_t, std::int64_t>> in_pieces(std::int64_t begin,
                                                                                        std::int64_t end,
                                                                                        std::int64_t size);

/// Finds out whether claims of one kind of batch run faster in smaller micro-batches, because these fit into a cache.
///
/// Now and then a few steps cut each claim into one piece of each size, each half as large as the one before. These
/// trials alternate with ordinary steps. Sizes are compared within a claim, where the conditions are the same. The
/// largest size is compared with the same device's ordinary claims, in the step before and the step after. That takes
/// eight steps, and up to 42 where times vary. If a size is in use, as many more steps compare whole claims with it. In
/// a step all devices try the same sizes, because shares follow from the ratios of their speeds.
class PACELINE_API SizeSearch {
 public:
  /// The size in use, in items. None: a claim is one micro-batch.
  [[nodiscard]] std::optional<std::int64_t> size() const { return size_; }
  /// How many times as fast `size` was measured to be as what was in use before.
  [[nodiscard]] double gain() const { return gain_; }
  /// Whether the next step tries sizes: its times are no evidence of speeds.
  [[nodiscard]] bool on_trial() const { return !trials_.empty() && turn_ % 2 == 0; }
  /// A claim of the next step, cut up.
  [[nodiscard]] std::vector<std::pair<std::int64_t, std::int64_t>> pieces(std::int64_t begin, std::int64_t end) const;
  /// A step that was committed: what each device ran.
  void add(const std::vector<TimedClaims>& devices);

 private:
  /// What a trial has measured on one device so far: logs of ratios of the time per item.
  struct Compared {
    std::int64_t items = 0;                          // that it ran
    double largest = 0.0;                            // the size of the first piece of its first claim
    std::vector<double> first{};                     // that size to steps as usual
    std::map<double, std::vector<double>> others{};  // each size to the largest in the same claim
    void add(std::span<const double> sizes, const std::vector<TimedPiece>& claim, double usual);
  };
  /// The log of a ratio, and its standard error.
  using Ratio = std::pair<double, double>;
  using Usual = std::vector<std::optional<double>>;  // of each device, seconds of an item

  void begin(const std::vector<TimedClaims>& devices, const Usual& usual);
  void start(std::size_t devices);
  [[nodiscard]] std::vector<std::int64_t> cuts(std::int64_t items) const;
  void compare(const Usual& usual);
  [[nodiscard]] std::map<double, Ratio> result() const;
  [[nodiscard]] bool is_certain() const;
  void end_trial();

  std::optional<std::int64_t> size_;
  double gain_ = 1.0;
  std::int64_t rest_ = 5;  // steps until the next search; the first ones compile and allocate
  // The trials to come. Each is a list of the sizes that a claim is cut into, from large to small; empty: it stays
  // whole.
  std::vector<std::vector<std::int64_t>> trials_;
  std::int64_t turn_ = 0;           // of the first of them
  Usual before_;                    // the step as usual before
  std::vector<TimedClaims> tried_;  // the step on trial that followed
  std::vector<Compared> compared_;  // of each device
  std::map<double, Ratio> found_;   // result() of all trials
};

}  // namespace paceline::balance
