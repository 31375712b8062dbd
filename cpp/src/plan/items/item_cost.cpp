// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include <paceline/error.hpp>
#include <paceline/plan/item_cost.hpp>

namespace paceline::plan {
namespace {

constexpr std::size_t kColumns = 3;
using Row = std::array<double, kColumns>;

// In the order of preference if two fit equally well: few columns first, then the constant, the tokens, the squares.
constexpr std::array<unsigned, 7> kColumnSets = {0b001, 0b010, 0b100, 0b011, 0b101, 0b110, 0b111};
// Fewer columns win, unless more of them lower the mean squared relative error by more than rounding.
constexpr double kRounding = 1e-20;
// The part of a column that is independent of those before it. Below this it says nothing new.
constexpr double kDependent = 1e-7;
constexpr int kRounds = 200;
constexpr double kStandsStill = 1e-13;
constexpr std::int64_t kMostDevices = 1 << 16;

void require(bool ok, std::size_t i, const char* what, double value) {
  if (ok) return;
  throw InvalidArgument(fmt::format("{} of sample {} is {}; leave out samples that were not measured", what, i, value));
}

void validate(std::span<const ItemSample> samples) {
  if (samples.empty()) throw InvalidArgument("a cost cannot be fitted to no samples; record some micro-batches first");
  for (std::size_t i = 0; i < samples.size(); ++i) {
    const ItemSample& sample = samples[i];
    require(std::isfinite(sample.tokens) && sample.tokens >= 0.0, i, "tokens", sample.tokens);
    require(std::isfinite(sample.squared_tokens) && sample.squared_tokens >= 0.0, i, "squared_tokens",
            sample.squared_tokens);
    require(std::isfinite(sample.seconds) && sample.seconds > 0.0, i, "seconds", sample.seconds);
    require(sample.device >= 0 && sample.device < kMostDevices, i, "device", static_cast<double>(sample.device));
  }
}

double squares_of(const ItemSample& sample) {
  return sample.squared_tokens > 0.0 ? sample.squared_tokens : sample.tokens * sample.tokens;
}

Row row_of(const ItemSample& sample) { return {1.0, sample.tokens, squares_of(sample)}; }

double predict(const Row& row, const Row& shape) { return row[0] * shape[0] + row[1] * shape[1] + row[2] * shape[2]; }

double dot(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

class Fit {
 public:
  explicit Fit(std::span<const ItemSample> samples) : samples_(samples) {
    std::int64_t devices = 0;
    for (const ItemSample& sample : samples) devices = std::max(devices, sample.device + 1);
    scales_.assign(static_cast<std::size_t>(devices), 0.0);
    for (const ItemSample& sample : samples) scales_[index(sample)] = 1.0;
    std::fill(unit_.begin(), unit_.end(), 1.0);
    // Columns are scaled to about one, since squared tokens are millions of times the constant.
    for (std::size_t column = 0; column < kColumns; ++column) {
      double largest = 0.0;
      for (const ItemSample& sample : samples) largest = std::max(largest, row_of(sample)[column]);
      if (largest > 0.0) unit_[column] = largest;
    }
  }

  ItemCostFit run() {
    double error = std::numeric_limits<double>::infinity();
    for (int round = 0; round < kRounds; ++round) {
      fit_shape();
      fit_scales();
      const double now = mean_square();
      if (!(now < error * (1.0 - kStandsStill))) break;
      error = now;
    }
    double fastest = std::numeric_limits<double>::infinity();
    for (const double scale : scales_) {
      if (scale > 0.0) fastest = std::min(fastest, scale);
    }
    if (!std::isfinite(fastest)) fastest = 1.0;
    for (double& scale : scales_) scale /= fastest;
    ItemCostFit fit;
    fit.shape = {shape_[0] * fastest, shape_[1] * fastest, shape_[2] * fastest};
    fit.scales = scales_;
    for (double& value : shape_) value *= fastest;
    fit.relative_rms = std::sqrt(mean_square());
    return fit;
  }

 private:
  static std::size_t index(const ItemSample& sample) { return static_cast<std::size_t>(sample.device); }

  void fit_shape() {
    std::array<std::vector<double>, kColumns> columns;
    for (const ItemSample& sample : samples_) {
      const Row row = row_of(sample);
      for (std::size_t column = 0; column < kColumns; ++column) {
        columns[column].push_back(row[column] / unit_[column] * scales_[index(sample)] / sample.seconds);
      }
    }
    double least = std::numeric_limits<double>::infinity();
    for (const unsigned set : kColumnSets) {
      Row weights{};
      double error = 0.0;
      if (!solve(columns, set, weights, error)) continue;
      if (error < least - kRounding) {
        least = error;
        for (std::size_t column = 0; column < kColumns; ++column) shape_[column] = weights[column] / unit_[column];
      }
    }
  }

  // Least squares of sum weights * column = 1 over the set's columns. Returns false if the columns are dependent or a
  // weight is negative. A smaller set is then as good.
  bool solve(const std::array<std::vector<double>, kColumns>& columns, unsigned set, Row& weights,
             double& error) const {
    std::array<std::vector<double>, kColumns> basis;  // orthonormal, by modified Gram-Schmidt
    std::array<Row, kColumns> upper{};
    Row projected{};
    std::vector<double> rest(samples_.size(), 1.0);
    for (std::size_t column = 0; column < kColumns; ++column) {
      if ((set >> column & 1U) == 0) continue;
      basis[column] = columns[column];
      const double whole = std::sqrt(dot(basis[column], basis[column]));
      for (std::size_t before = 0; before < column; ++before) {
        if ((set >> before & 1U) == 0) continue;
        upper[before][column] = dot(basis[before], basis[column]);
        subtract(basis[column], upper[before][column], basis[before]);
      }
      const double left = std::sqrt(dot(basis[column], basis[column]));
      if (!(left > kDependent * whole)) return false;
      upper[column][column] = left;
      for (double& value : basis[column]) value /= left;
      projected[column] = dot(basis[column], rest);
      subtract(rest, projected[column], basis[column]);
    }
    for (std::size_t column = kColumns; column-- > 0;) {
      if ((set >> column & 1U) == 0) continue;
      double value = projected[column];
      for (std::size_t after = column + 1; after < kColumns; ++after) value -= upper[column][after] * weights[after];
      weights[column] = value / upper[column][column];
      if (weights[column] < 0.0) return false;
    }
    error = dot(rest, rest) / static_cast<double>(rest.size());
    return true;
  }

  static void subtract(std::vector<double>& from, double factor, const std::vector<double>& what) {
    for (std::size_t i = 0; i < from.size(); ++i) from[i] -= factor * what[i];
  }

  // The best scale of each device is a regression through the origin.
  void fit_scales() {
    std::vector<double> top(scales_.size(), 0.0);
    std::vector<double> bottom(scales_.size(), 0.0);
    for (const ItemSample& sample : samples_) {
      const double ratio = predict(row_of(sample), shape_) / sample.seconds;
      top[index(sample)] += ratio;
      bottom[index(sample)] += ratio * ratio;
    }
    for (std::size_t device = 0; device < scales_.size(); ++device) {
      if (bottom[device] > 0.0) scales_[device] = top[device] / bottom[device];
    }
  }

  [[nodiscard]] double mean_square() const {
    double sum = 0.0;
    for (const ItemSample& sample : samples_) {
      const double error = scales_[index(sample)] * predict(row_of(sample), shape_) / sample.seconds - 1.0;
      sum += error * error;
    }
    return sum / static_cast<double>(samples_.size());
  }

  std::span<const ItemSample> samples_;
  Row unit_{};
  Row shape_{};
  std::vector<double> scales_;
};

}  // namespace

ItemCostFit fit_item_cost(std::span<const ItemSample> samples) {
  validate(samples);
  return Fit(samples).run();
}

}  // namespace paceline::plan
