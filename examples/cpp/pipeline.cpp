// SPDX-License-Identifier: Apache-2.0
//
// Trains a network that is cut into stages, on handwritten digits: a pipeline over three devices, one of which is half
// as fast as the others.
//
//   pipeline [digits.csv [epochs]]
//
// The library is given the network block by block, and cuts it between blocks. It measures the blocks in the first
// steps. Then the slow device gets fewer of them.
#include <algorithm>
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <numeric>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include <paceline/paceline.hpp>

#include "digits_data.hpp"

namespace {

using paceline::BlockRun;

constexpr std::size_t kTestImages = 450;
constexpr std::size_t kBatch = 192;
constexpr int kEpochs = 24;
constexpr int kEpochsPerRow = 4;
constexpr double kGoal = 0.94;  // on the test set; the network reaches 96 to 97 %
constexpr float kLearningRate = 0.05F;
constexpr float kMomentum = 0.9F;
constexpr std::size_t kWidths[] = {Digits::kPixels, 48, 48, 48, 48, 48, 10};
constexpr std::size_t kBlocks = std::size(kWidths) - 1;

// The machine may have fewer cores than there are devices here. So these devices are played: each block takes this long
// for an item, and sleeps for what it does not compute.
constexpr std::chrono::microseconds kForward{10};
constexpr std::chrono::microseconds kBackward{20};
constexpr double kSpeeds[] = {1.0, 0.5, 1.0};

/// A dense layer: ReLU(input * weights + biases), without ReLU for the last one. Weights are ordered by input.
struct Layer {
  std::size_t in;
  std::size_t out;
  bool last;

  explicit Layer(std::size_t block) : in(kWidths[block]), out(kWidths[block + 1]), last(block + 1 == kBlocks) {}
  [[nodiscard]] std::size_t parameters() const { return (in + 1) * out; }

  void forward(const float* parameters, const float* input, float* output) const {
    std::copy_n(parameters + in * out, out, output);
    for (std::size_t i = 0; i < in; ++i) {
      for (std::size_t j = 0; j < out; ++j) output[j] += input[i] * parameters[i * out + j];
    }
    for (std::size_t j = 0; j < out && !last; ++j) output[j] = std::max(output[j], 0.0F);
  }

  /// `error` is the gradient of the sum before ReLU. Writes that of the input, unless it is null.
  void backward(const float* parameters, const float* input, const float* error, float* input_gradient,
                float* gradients) const {
    for (std::size_t j = 0; j < out; ++j) gradients[in * out + j] += error[j];
    for (std::size_t i = 0; i < in; ++i) {
      float sum = 0.0F;
      for (std::size_t j = 0; j < out; ++j) {
        gradients[i * out + j] += input[i] * error[j];
        sum += parameters[i * out + j] * error[j];
      }
      if (input_gradient != nullptr) input_gradient[i] = sum;
    }
  }
};

/// The bodies of one step. Items of the batch are images of the set, in a shuffled order.
class Network {
 public:
  Network(const Digits& digits, std::span<const std::size_t> batch) : digits_(digits), batch_(batch) {}

  [[nodiscard]] static std::vector<paceline::PipelineBlock> blocks() {
    std::vector<paceline::PipelineBlock> blocks;
    for (std::size_t b = 0; b < kBlocks; ++b) {
      const Layer layer(b);
      blocks.push_back({.parameter_count = layer.parameters(),
                        .output_count = layer.last ? 0 : layer.out,
                        .saved_count = layer.out,  // the error of its sums; the last block has it after its forward
                        .state_count = layer.parameters()});
    }
    return blocks;
  }

  double forward(const BlockRun& run) const {
    const Layer layer(run.block);
    double loss = 0.0;
    for (std::size_t k = 0; k < items(run); ++k) {
      float* const output = layer.last ? &run.saved[k * layer.out] : &run.output[k * layer.out];
      layer.forward(run.parameters.data(), input(run, layer, k), output);
      if (layer.last) loss += softmax(output, layer.out, digits_.labels[image(run, k)]);
    }
    return loss;
  }

  void backward(const BlockRun& run) const {
    const Layer layer(run.block);
    for (std::size_t k = 0; k < items(run); ++k) {
      float* const error = &run.saved[k * layer.out];
      for (std::size_t j = 0; j < layer.out && !layer.last; ++j) {
        error[j] = run.output[k * layer.out + j] > 0.0F ? run.output_gradient[k * layer.out + j] : 0.0F;
      }
      layer.backward(run.parameters.data(), input(run, layer, k), error,
                     run.block == 0 ? nullptr : &run.input_gradient[k * layer.in], run.gradients.data());
    }
  }

 private:
  [[nodiscard]] static std::size_t items(const BlockRun& run) { return static_cast<std::size_t>(run.size()); }
  [[nodiscard]] std::size_t image(const BlockRun& run, std::size_t k) const {
    return batch_[static_cast<std::size_t>(run.begin) + k];
  }
  [[nodiscard]] const float* input(const BlockRun& run, const Layer& layer, std::size_t k) const {
    return run.block == 0 ? digits_.image(image(run, k)) : &run.input[k * layer.in];
  }

  /// Cross entropy. Turns the scores into its gradient.
  static double softmax(float* scores, std::size_t count, int label) {
    const auto truth = static_cast<std::size_t>(label);
    const float highest = *std::max_element(scores, scores + count);
    const float score = scores[truth];
    float sum = 0.0F;
    for (std::size_t c = 0; c < count; ++c) sum += scores[c] = std::exp(scores[c] - highest);
    for (std::size_t c = 0; c < count; ++c) scores[c] /= sum;
    scores[truth] -= 1.0F;
    return std::log(sum) - (score - highest);
  }

  const Digits& digits_;
  std::span<const std::size_t> batch_;
};

/// Makes a block last as long as it would on the device that it is played on.
class Paced {
 public:
  Paced(const BlockRun& run, std::chrono::microseconds item)
      : end_(std::chrono::steady_clock::now() +
             std::chrono::duration_cast<std::chrono::nanoseconds>(item * static_cast<double>(run.size()) /
                                                                  kSpeeds[run.device.number()])) {}
  ~Paced() { std::this_thread::sleep_until(end_); }
  Paced(const Paced&) = delete;
  Paced& operator=(const Paced&) = delete;

 private:
  std::chrono::steady_clock::time_point end_;
};

/// The gradients that one device gets if it adds up the same micro-batches, one after another.
bool equals_one_device(paceline::Pipeline& trainer, const Network& network,
                       const std::vector<std::vector<float>>& before) {
  paceline::PipelineOptions options{.blocks = Network::blocks()};
  options.stages.micro_batches = static_cast<std::int64_t>(trainer.plan().sizes.size());
  options.costs.assign(kBlocks, {});
  options.batch_size = std::accumulate(trainer.plan().sizes.begin(), trainer.plan().sizes.end(), std::int64_t{0});
  paceline::Pipeline one{paceline::DeviceGroup({paceline::find_device("host:0")}), options};
  for (std::size_t b = 0; b < kBlocks; ++b) std::copy(before[b].begin(), before[b].end(), one.parameters(b).begin());
  one.step(
      options.batch_size, [&](const BlockRun& run) { return network.forward(run); },
      [&](const BlockRun& run) { network.backward(run); });
  for (std::size_t b = 0; b < kBlocks; ++b) {
    const auto mine = one.gradients(b);
    if (std::memcmp(mine.data(), trainer.gradients(b).data(), mine.size_bytes()) != 0) return false;
  }
  return true;
}

int classify(paceline::Pipeline& trainer, const float* image) {
  std::vector<float> input(image, image + Digits::kPixels);
  for (std::size_t b = 0; b < kBlocks; ++b) {
    const Layer layer(b);
    std::vector<float> output(layer.out);
    layer.forward(trainer.parameters(b).data(), input.data(), output.data());
    input = std::move(output);
  }
  return static_cast<int>(std::max_element(input.begin(), input.end()) - input.begin());
}

void print(const paceline::plan::StagePlan& plan, const paceline::DeviceGroup& group) {
  for (std::size_t s = 0; s < plan.order.size(); ++s) {
    const std::size_t end = s + 1 < plan.cuts.size() ? plan.cuts[s + 1] : kBlocks;
    std::printf("  stage %zu: blocks %zu to %zu on %s\n", s, plan.cuts[s], end - 1,
                group.devices()[plan.order[s]].name.c_str());
  }
}

int train(const std::string& path, int epochs) {
  const Digits digits = read_digits(path);
  if (digits.size() <= kTestImages) throw std::runtime_error(path + " has too few images to test with 450 of them");

  // A fixed seed, so that every run holds out the same images.
  std::mt19937 random(0);  // NOLINT(cert-msc51-cpp)
  std::vector<std::size_t> order(digits.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::shuffle(order.begin(), order.end(), random);
  const std::vector<std::size_t> test(order.end() - kTestImages, order.end());
  order.resize(order.size() - kTestImages);

  // Host devices beyond the machine's cores share cores.
  const std::vector<std::string> names{"host:0", "host:1", "host:2"};
  paceline::Pipeline trainer{paceline::DeviceGroup(names), {.blocks = Network::blocks(), .batch_size = kBatch}};
  for (std::size_t b = 0; b < kBlocks; ++b) {
    std::normal_distribution<float> weight(0.0F, std::sqrt(2.0F / static_cast<float>(kWidths[b])));  // He et al. 2015
    for (float& one : trainer.parameters(b).first(kWidths[b] * kWidths[b + 1])) one = weight(random);
  }

  std::printf("%6s  %7s  %10s  %10s\n", "epoch", "loss", "ms/step", "predicted");
  bool exact = true;
  for (int epoch = 1; epoch <= epochs; ++epoch) {
    std::shuffle(order.begin(), order.end(), random);
    double loss = 0.0;
    double seconds = 0.0;
    int steps = 0;
    for (std::size_t begin = 0; begin + kBatch <= order.size(); begin += kBatch, ++steps) {
      const Network network(digits, std::span(order).subspan(begin, kBatch));
      std::vector<std::vector<float>> before;
      if (epoch % kEpochsPerRow == 1 && begin == 0) {
        for (std::size_t b = 0; b < kBlocks; ++b) {
          before.emplace_back(trainer.parameters(b).begin(), trainer.parameters(b).end());
        }
      }
      const paceline::Objective of_step = trainer.step(
          kBatch,
          [&](const BlockRun& run) {
            const Paced paced(run, kForward);
            return network.forward(run);
          },
          [&](const BlockRun& run) {
            const Paced paced(run, kBackward);
            network.backward(run);
          });
      loss += of_step.value();
      if (!before.empty()) exact = exact && equals_one_device(trainer, network, before);
      trainer.update([](const paceline::BlockUpdate& one) {
        for (std::size_t i = 0; i < one.parameters.size(); ++i) {
          one.state[i] = kMomentum * one.state[i] + one.gradients[i];
          one.parameters[i] -= kLearningRate * one.state[i];
        }
      });
      seconds += trainer.last_step().step_seconds;
    }
    if (epoch % kEpochsPerRow == 0 || epoch == epochs) {
      std::printf("%6d  %7.4f  %10.2f  %10.2f\n", epoch, loss / steps, 1e3 * seconds / steps,
                  1e3 * trainer.last_step().plan.seconds);
    }
  }

  std::printf("\n%s is half as fast as the others:\n", names[1].c_str());
  print(trainer.plan(), trainer.group());
  std::printf("%s\n\n", trainer.explain().c_str());
  const auto right = std::count_if(test.begin(), test.end(), [&](std::size_t index) {
    return classify(trainer, digits.image(index)) == digits.labels[index];
  });
  const double accuracy = static_cast<double>(right) / static_cast<double>(kTestImages);
  std::printf("gradients %s those of one device, bit by bit\n", exact ? "equal" : "DIFFER FROM");
  std::printf("test accuracy: %.1f%% of %zu images that it was not trained on\n", 100.0 * accuracy, kTestImages);
  if (accuracy < kGoal && epochs >= kEpochs) {
    std::fprintf(stderr, "that is less than the %.0f%% which this network reaches\n", 100.0 * kGoal);
    return 1;
  }
  return exact ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string path = argc > 1 ? argv[1] : DIGITS_CSV;
  int epochs = kEpochs;
  const std::string_view number = argc > 2 ? argv[2] : "";
  const bool valid = number.empty() || (std::from_chars(number.data(), number.data() + number.size(), epochs).ptr ==
                                            number.data() + number.size() &&
                                        epochs > 0);
  if (argc > 3 || !valid) {
    std::fprintf(stderr, "usage: pipeline [digits.csv [epochs]]\n");
    return 2;
  }
  try {
    return train(path, epochs);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "pipeline: %s\n", error.what());
    return 1;
  }
}
