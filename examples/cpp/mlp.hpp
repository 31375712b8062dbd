// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <random>
#include <span>

/// A network with one hidden layer, 64 - 128 - 10, with ReLU, softmax and cross entropy. One flat vector holds its
/// parameters: weights and biases of the first layer, then those of the second. The class has no state, so any number
/// of threads may use it.
class Mlp {
 public:
  static constexpr std::size_t kInputs = 64;
  static constexpr std::size_t kHidden = 128;
  static constexpr std::size_t kClasses = 10;
  static constexpr std::size_t kParameters = kInputs * kHidden + kHidden + kHidden * kClasses + kClasses;

  /// Random weights (He et al. 2015: variance 2 / inputs) and zero biases.
  static void initialise(std::span<float> parameters, std::mt19937& random);

  /// The class that the network predicts for the image.
  [[nodiscard]] static int classify(std::span<const float> parameters, const float* image);

  /// The loss of one image. Adds its gradient to `gradients`.
  static double backward(std::span<const float> parameters, std::span<float> gradients, const float* image, int label);
};
