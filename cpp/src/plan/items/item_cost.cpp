// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>

#include <paceline/plan/item_cost.hpp>

#include "refuse.hpp"

namespace paceline::plan {
namespace {

constexpr std::size_t kColumns = 3;
using Row = std::array<double, kColumns>;

// In the order of preference if two fit equally well: few columns first, then the constant, the tokens, the squares.
using Columns = std::vector<std::size_t>;
const std::array<Columns, 7> kColumnSets = {{{0}, {1}, {2}, {0, 1}, {0, 2}, {1, 2}, {0, 1, 2}}};
// Fewer columns win, unless more of them lower the mean squared relative error by more than rounding.
constexpr double kErrorRounding = 1e-20;
// The part of a column that is independent of those before it. Below this it says nothing new.
constexpr double kDependent = 1e-7;
constexpr int kMostFitRounds = 200;
constexpr double kStandsStill = 1e-13;
constexpr std::int64_t kMostDevices = 1 << 16;

void validate(std::span<const ItemSample> samples) {
  if (samples.empty()) refuse("a cost cannot be fitted to no samples; record some micro-batches first");
  for (std::size_t i = 0; i < samples.size(); ++i) {
    const auto require = [&](bool fine, const char* what, auto value) {
      if (fine && std::isfinite(static_cast<double>(value))) return;
      refuse("{} of sample {} is {}; leave out samples that were not measured", what, i, value);
    };
    const auto& [tokens, seconds, device, squared_tokens] = samples[i];
    require(tokens >= 0.0, "tokens", tokens);
    require(squared_tokens >= 0.0, "squared_tokens", squared_tokens);
    require(seconds > 0.0, "seconds", seconds);
    require(device >= 0 && device < kMostDevices, "device", device);
  }
}

double squares_of(const ItemSample& sample) {
  return sample.squared_tokens > 0.0 ? sample.squared_tokens : sample.tokens * sample.tokens;
}

Row row_of(const ItemSample& sample) { return {1.0, sample.tokens, squares_of(sample)}; }

double predict(const Row& row, const Row& shape) { return row[0] * shape[0] + row[1] * shape[1] + row[2] * shape[2]; }

double dot(const std::vector<double>& a, const std::vector<double>& b) {
  return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
}

class Fit {
 public:
  explicit Fit(std::span<const ItemSample> samples) : samples_(samples) {
    std::int64_t devices = 0;
    for (const ItemSample& sample : samples) devices = std::max(devices, sample.device + 1);
    scales_.assign(static_cast<std::size_t>(devices), 0.0);
    for (const ItemSample& sample : samples) scales_[index(sample)] = 1.0;
    // Columns are scaled to about one, since squared tokens are millions of times the constant.
    for (std::size_t column = 0; column < kColumns; ++column) {
      double largest = 0.0;
      for (const ItemSample& sample : samples) largest = std::max(largest, row_of(sample)[column]);
      if (largest > 0.0) unit_[column] = largest;
    }
  }

  ItemCostFit run() {
    double error = std::numeric_limits<double>::infinity();
    for (int round = 0; round < kMostFitRounds; ++round) {
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
    for (double& value : shape_) value *= fastest;
    return {{shape_[0], shape_[1], shape_[2]}, scales_, std::sqrt(mean_square())};
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
    for (const Columns& set : kColumnSets) {
      Row weights{};
      double error = 0.0;
      if (!solve(columns, set, weights, error)) continue;
      if (error < least - kErrorRounding) {
        least = error;
        for (std::size_t column = 0; column < kColumns; ++column) shape_[column] = weights[column] / unit_[column];
      }
    }
  }

  // Least squares of sum weights * column = 1 over the set's columns. Returns false if the columns are dependent or a
  // weight is negative. A smaller set is then as good.
  bool solve(const std::array<std::vector<double>, kColumns>& columns, const Columns& set, Row& weights,
             double& error) const {
    std::array<std::vector<double>, kColumns> basis;  // orthonormal, by modified Gram-Schmidt
    std::array<Row, kColumns> upper{};
    Row projected{};
    std::vector<double> rest(samples_.size(), 1.0);
    for (std::size_t k = 0; k < set.size(); ++k) {
      basis[k] = columns[set[k]];
      const double whole = std::sqrt(dot(basis[k], basis[k]));
      for (std::size_t before = 0; before < k; ++before) {
        upper[before][k] = dot(basis[before], basis[k]);
        subtract(basis[k], upper[before][k], basis[before]);
      }
      const double left = std::sqrt(dot(basis[k], basis[k]));
      if (!(left > kDependent * whole)) return false;
      upper[k][k] = left;
      for (double& value : basis[k]) value /= left;
      projected[k] = dot(basis[k], rest);
      subtract(rest, projected[k], basis[k]);
    }
    for (std::size_t k = set.size(); k-- > 0;) {
      double value = projected[k];
      for (std::size_t after = k + 1; after < set.size(); ++after) value -= upper[k][after] * weights[set[after]];
      weights[set[k]] = value / upper[k][k];
      if (weights[set[k]] < 0.0) return false;
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
  Row unit_{1.0, 1.0, 1.0};
  Row shape_{};
  std::vector<double> scales_;
};

}  // namespace

ItemCostFit fit_item_cost(std::span<const ItemSample> samples) {
  validate(samples);
  return Fit(samples).run();
}

}  // namespace paceline::plan
