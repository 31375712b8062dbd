// SPDX-License-Identifier: Apache-2.0
#include "mlp.hpp"

#include <algorithm>
#include <array>
#include <cmath>

namespace {

constexpr std::size_t kWeights1 = 0;
constexpr std::size_t kBiases1 = kWeights1 + Mlp::kInputs * Mlp::kHidden;
constexpr std::size_t kWeights2 = kBiases1 + Mlp::kHidden;
constexpr std::size_t kBiases2 = kWeights2 + Mlp::kHidden * Mlp::kClasses;

// Weights are ordered by input: all weights of the first input, then all of the second. So every inner loop below runs
// over neighbouring elements, which compilers vectorise.
struct Activations {
  std::array<float, Mlp::kHidden> hidden;
  std::array<float, Mlp::kClasses> scores;
};

Activations forward(std::span<const float> parameters, const float* image) {
  Activations result;
  std::copy_n(parameters.begin() + kBiases1, Mlp::kHidden, result.hidden.begin());
  for (std::size_t i = 0; i < Mlp::kInputs; ++i) {
    const float* weights = &parameters[kWeights1 + i * Mlp::kHidden];
    for (std::size_t j = 0; j < Mlp::kHidden; ++j) result.hidden[j] += image[i] * weights[j];
  }
  for (float& value : result.hidden) value = std::max(value, 0.0F);
  std::copy_n(parameters.begin() + kBiases2, Mlp::kClasses, result.scores.begin());
  for (std::size_t j = 0; j < Mlp::kHidden; ++j) {
    const float* weights = &parameters[kWeights2 + j * Mlp::kClasses];
    for (std::size_t c = 0; c < Mlp::kClasses; ++c) result.scores[c] += result.hidden[j] * weights[c];
  }
  return result;
}

}  // namespace

void Mlp::initialise(std::span<float> parameters, std::mt19937& random) {
  std::fill(parameters.begin(), parameters.end(), 0.0F);
  std::normal_distribution<float> first(0.0F, std::sqrt(2.0F / kInputs));
  std::normal_distribution<float> second(0.0F, std::sqrt(2.0F / kHidden));
  for (float& weight : parameters.subspan(kWeights1, kInputs * kHidden)) weight = first(random);
  for (float& weight : parameters.subspan(kWeights2, kHidden * kClasses)) weight = second(random);
}

int Mlp::classify(std::span<const float> parameters, const float* image) {
  const Activations activations = forward(parameters, image);
  return static_cast<int>(std::max_element(activations.scores.begin(), activations.scores.end()) -
                          activations.scores.begin());
}

double Mlp::backward(std::span<const float> parameters, std::span<float> gradients, const float* image, int label) {
  const Activations activations = forward(parameters, image);

  // Softmax. Subtracting the highest score first prevents overflow.
  const float highest = *std::max_element(activations.scores.begin(), activations.scores.end());
  std::array<float, kClasses> error;
  float sum = 0.0F;
  for (std::size_t c = 0; c < kClasses; ++c) sum += error[c] = std::exp(activations.scores[c] - highest);
  for (float& value : error) value /= sum;
  const auto truth = static_cast<std::size_t>(label);
  const double loss = std::log(sum) - (activations.scores[truth] - highest);
  error[truth] -= 1.0F;

  for (std::size_t c = 0; c < kClasses; ++c) gradients[kBiases2 + c] += error[c];
  std::array<float, kHidden> hidden_error{};
  for (std::size_t j = 0; j < kHidden; ++j) {
    if (activations.hidden[j] <= 0.0F) continue;
    const float* weights = &parameters[kWeights2 + j * kClasses];
    float* gradient = &gradients[kWeights2 + j * kClasses];
    for (std::size_t c = 0; c < kClasses; ++c) {
      gradient[c] += activations.hidden[j] * error[c];
      hidden_error[j] += weights[c] * error[c];
    }
  }
  for (std::size_t j = 0; j < kHidden; ++j) gradients[kBiases1 + j] += hidden_error[j];
  for (std::size_t i = 0; i < kInputs; ++i) {
    float* gradient = &gradients[kWeights1 + i * kHidden];
    for (std::size_t j = 0; j < kHidden; ++j) gradient[j] += image[i] * hidden_error[j];
  }
  return loss;
}
