// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <paceline/engine/pipeline.hpp>

namespace paceline {

/// A small model of blocks, in double precision. A block is y = tanh(W x + b), of widths that differ. The first block
/// makes its input of the item's number; the last one sums its outputs times a target, which is the loss.
class BlockModel {
 public:
  explicit BlockModel(std::vector<std::size_t> widths) : widths_(std::move(widths)) {}

  [[nodiscard]] std::size_t size() const noexcept { return widths_.size() - 1; }
  [[nodiscard]] std::vector<PipelineBlock> blocks() const {
    std::vector<PipelineBlock> blocks;
    for (std::size_t b = 0; b < size(); ++b) {
      const bool last = b + 1 == size();
      blocks.push_back({.parameter_count = parameters(b),
                        .output_count = last ? 0 : widths_[b + 1],
                        .saved_count = widths_[b + 1] + (b == 0 ? widths_[0] : 0),
                        .state_count = 1});
    }
    return blocks;
  }
  [[nodiscard]] std::size_t parameters(std::size_t b) const { return (widths_[b] + 1) * widths_[b + 1]; }

  void initialise(std::size_t b, std::span<double> parameters) const {
    for (std::size_t k = 0; k < parameters.size(); ++k) {
      parameters[k] = 0.7 * std::sin(static_cast<double>(k * 7 + b * 3 + 1));
    }
  }

  double forward(std::size_t b, std::int64_t begin, std::int64_t end, const double* parameters, const double* input,
                 double* output, double* saved) const {
    const std::size_t in = widths_[b];
    const std::size_t out = widths_[b + 1];
    double loss = 0.0;
    for (std::int64_t item = begin; item < end; ++item) {
      const auto n = static_cast<std::size_t>(item - begin);
      double* const mine = saved + n * saved_count(b);
      const double* x = input + n * in;
      if (b == 0) {
        for (std::size_t j = 0; j < in; ++j)
          mine[out + j] = std::sin(static_cast<double>(item) * 3.1 + static_cast<double>(j));
        x = mine + out;
      }
      for (std::size_t i = 0; i < out; ++i) {
        double sum = parameters[in * out + i];
        for (std::size_t j = 0; j < in; ++j) sum += parameters[i * in + j] * x[j];
        mine[i] = std::tanh(sum);
        if (b + 1 == size()) {
          loss += mine[i] * target(item, i);
        } else {
          output[n * out + i] = mine[i];
        }
      }
    }
    return loss;
  }

  void backward(std::size_t b, std::int64_t begin, std::int64_t end, const double* parameters, const double* input,
                const double* saved, const double* output_gradient, double* input_gradient, double* gradients) const {
    const std::size_t in = widths_[b];
    const std::size_t out = widths_[b + 1];
    for (std::int64_t item = begin; item < end; ++item) {
      const auto n = static_cast<std::size_t>(item - begin);
      const double* const mine = saved + n * saved_count(b);
      const double* const x = b == 0 ? mine + out : input + n * in;
      if (b > 0) {
        for (std::size_t j = 0; j < in; ++j) input_gradient[n * in + j] = 0.0;
      }
      for (std::size_t i = 0; i < out; ++i) {
        const double above = b + 1 == size() ? target(item, i) : output_gradient[n * out + i];
        const double d = above * (1.0 - mine[i] * mine[i]);
        gradients[in * out + i] += d;
        for (std::size_t j = 0; j < in; ++j) {
          gradients[i * in + j] += d * x[j];
          if (b > 0) input_gradient[n * in + j] += d * parameters[i * in + j];
        }
      }
    }
  }

  double forward(const BasicBlockRun<double>& run) const {
    return forward(run.block, run.begin, run.end, run.parameters.data(), run.input.data(), run.output.data(),
                   run.saved.data());
  }
  void backward(const BasicBlockRun<double>& run) const {
    backward(run.block, run.begin, run.end, run.parameters.data(), run.input.data(), run.saved.data(),
             run.output_gradient.data(), run.input_gradient.data(), run.gradients.data());
  }

  /// One device that accumulates the gradients of micro-batches of these sizes, one after another.
  struct Reference {
    double loss = 0.0;                           ///< over the batch size
    std::vector<std::vector<double>> gradients;  ///< of each block
  };
  [[nodiscard]] Reference reference(const std::vector<std::vector<double>>& parameters,
                                    const std::vector<std::int64_t>& sizes) const {
    Reference result;
    for (std::size_t b = 0; b < size(); ++b) result.gradients.emplace_back(this->parameters(b), 0.0);
    std::int64_t begin = 0;
    for (const std::int64_t items : sizes) {
      const auto n = static_cast<std::size_t>(items);
      std::vector<std::vector<double>> outputs(size());
      std::vector<std::vector<double>> saved(size());
      for (std::size_t b = 0; b < size(); ++b) {
        outputs[b].resize(n * widths_[b + 1]);
        saved[b].resize(n * saved_count(b));
        result.loss += forward(b, begin, begin + items, parameters[b].data(), b == 0 ? nullptr : outputs[b - 1].data(),
                               outputs[b].data(), saved[b].data());
      }
      std::vector<double> gradient;
      for (std::size_t b = size(); b-- > 0;) {
        std::vector<double> below(n * widths_[b]);
        backward(b, begin, begin + items, parameters[b].data(), b == 0 ? nullptr : outputs[b - 1].data(),
                 saved[b].data(), gradient.data(), below.data(), result.gradients[b].data());
        gradient = std::move(below);
      }
      begin += items;
    }
    for (auto& block : result.gradients) {
      for (double& one : block) one *= 1.0 / static_cast<double>(begin);
    }
    result.loss /= static_cast<double>(begin);
    return result;
  }

 private:
  [[nodiscard]] std::size_t saved_count(std::size_t b) const { return widths_[b + 1] + (b == 0 ? widths_[0] : 0); }
  [[nodiscard]] static double target(std::int64_t item, std::size_t i) {
    return std::cos(static_cast<double>(item) + 0.5 * static_cast<double>(i));
  }

  std::vector<std::size_t> widths_;
};

}  // namespace paceline
