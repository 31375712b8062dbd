// SPDX-License-Identifier: Apache-2.0
//
// Trains a torch::nn module on all host devices of this machine, with paceline's C++ API and libtorch.
//
// The images are striped, and the network tells the direction of the stripes. First the program compares the gradient
// of a step with the gradient of one module over the whole batch, in float and in double. It exits with status 1 if
// they differ by more than rounding, or if training does not lower the loss.
#include <torch/torch.h>

#include <cstdint>
#include <cstdio>
#include <exception>
#include <memory>
#include <numbers>
#include <vector>

#include <paceline/paceline.hpp>

#include "flat_module.hpp"

namespace {

constexpr std::int64_t kClasses = 4;
constexpr std::int64_t kSide = 16;  // pixels
constexpr std::int64_t kItems = 4096;
constexpr std::int64_t kBatch = 256;
constexpr int kSteps = 100;
constexpr double kNoise = 0.7;

struct Network : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& images) {
    torch::Tensor hidden = torch::relu(first->forward(images));
    hidden = torch::relu(second->forward(hidden));
    return head->forward(hidden.mean({2, 3}));
  }

  torch::nn::Conv2d first = register_module("first", torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 16, 5).bias(false)));
  torch::nn::Conv2d second =
      register_module("second", torch::nn::Conv2d(torch::nn::Conv2dOptions(16, 32, 3).bias(false)));
  torch::nn::Linear head = register_module("head", torch::nn::Linear(32, kClasses));
};

struct Gratings {
  torch::Tensor images;  ///< [kItems, 1, kSide, kSide]
  torch::Tensor labels;  ///< [kItems], the direction
};

/// Stripes with a period of four pixels, at a random place and in one of kClasses directions, with noise.
Gratings make_gratings() {
  const torch::Tensor labels = torch::randint(kClasses, {kItems}, torch::kInt64);
  const torch::Tensor angle = labels.to(torch::kDouble).view({-1, 1, 1, 1}) * (std::numbers::pi / kClasses);
  const torch::Tensor phase = torch::rand({kItems, 1, 1, 1}, torch::kDouble) * (2.0 * std::numbers::pi);
  const torch::Tensor x = torch::arange(kSide, torch::kDouble).view({1, 1, 1, -1});
  const torch::Tensor y = torch::arange(kSide, torch::kDouble).view({1, 1, -1, 1});
  const torch::Tensor wave = torch::sin((x * angle.cos() + y * angle.sin()) * (std::numbers::pi / 2.0) + phase);
  return {.images = wave + kNoise * torch::randn_like(wave), .labels = labels};
}

/// The sum of the losses of these items. The trainer divides by the size of the batch.
torch::Tensor loss_sum(Network& network, const torch::Tensor& images, const torch::Tensor& labels) {
  namespace F = torch::nn::functional;
  return F::cross_entropy(network.forward(images), labels, F::CrossEntropyFuncOptions().reduction(torch::kSum));
}

/// A trainer whose memory holds the parameters and gradients of `network`. So evaluate, save, load and optimise the
/// network as usual while the training lives. zero_grad() is not needed: each step overwrites the gradients.
template <class T>
class Training {
 public:
  explicit Training(Network& network, std::int64_t micro_batch = 0)
      : trainer_(paceline::DeviceGroup::all(paceline::DeviceKind::host),
                 {.parameter_count = parameter_count(network), .micro_batch = micro_batch}),
        modules_(trainer_.group(), [] { return std::make_shared<Network>(); }) {
    copy_parameters<T>(network, trainer_.parameters());
    use_memory<T>(network, trainer_.parameters(), trainer_.gradients());
  }

  /// Computes the gradient of the mean loss of the items. Returns this loss.
  double step(const torch::Tensor& images, const torch::Tensor& labels) {
    const auto body = [&](const paceline::MicroBatch& items, paceline::BasicReplica<T>& replica) {
      const torch::Tensor loss = loss_sum(modules_.of(replica), images.slice(0, items.begin, items.end),
                                          labels.slice(0, items.begin, items.end));
      loss.backward();
      return loss.item<double>();
    };
    return trainer_.step(images.size(0), body).value();
  }

  [[nodiscard]] const paceline::BasicDataParallel<T>& trainer() const { return trainer_; }

 private:
  paceline::BasicDataParallel<T> trainer_;
  DeviceModules<Network, T> modules_;
};

torch::Tensor gradient_of(const Network& network) {
  std::vector<torch::Tensor> parts;
  for (const torch::Tensor& parameter : network.parameters()) parts.push_back(parameter.grad().flatten());
  return torch::cat(parts);
}

/// Compares the gradient of a step with the gradient of one module over the whole batch.
template <class T>
bool gradients_agree(const Gratings& data, const char* type, double tolerance) {
  constexpr torch::ScalarType kType = torch::CppTypeToScalarType<T>::value;
  const torch::Tensor images = data.images.slice(0, 0, kBatch).to(kType);
  const torch::Tensor labels = data.labels.slice(0, 0, kBatch);

  Network network;
  network.to(kType);
  (loss_sum(network, images, labels) / static_cast<double>(kBatch)).backward();
  const torch::Tensor whole = gradient_of(network);
  network.zero_grad();  // so that what follows is the step's

  Training<T> training(network, kBatch / 10);  // several micro-batches for each device, and a smaller one
  training.step(images, labels);
  const double difference = (gradient_of(network) - whole).abs().max().template item<double>();
  std::printf("%s: the gradient of %zu devices differs from that of one module by %.1e; its largest element is %.1e\n",
              type, training.trainer().group().size(), difference, whole.abs().max().template item<double>());
  return difference <= tolerance;  // false for NaN
}

bool train(const Gratings& data) {
  const torch::Tensor images = data.images.to(torch::kFloat);
  Network network;
  Training<float> training(network);
  torch::optim::AdamW optimizer(network.parameters(), torch::optim::AdamWOptions(3e-3));

  double first = 0.0;
  double last = 0.0;
  for (int step = 1; step <= kSteps; ++step) {
    const torch::Tensor rows = torch::randint(kItems, {kBatch}, torch::kInt64);
    last = training.step(images.index_select(0, rows), data.labels.index_select(0, rows));
    optimizer.step();
    if (step == 1) first = last;
    if (step == 1 || step % 20 == 0) std::printf("step %3d: loss %.4f\n", step, last);
  }
  std::printf("%s\n", training.trainer().explain().c_str());

  const torch::NoGradGuard no_grad;
  const torch::Tensor right = network.forward(images).argmax(1) == data.labels;
  std::printf("%.1f%% of the images are right\n", 100.0 * right.to(torch::kDouble).mean().item<double>());
  return last < 0.5 * first;
}

}  // namespace

int main() {
  try {
    torch::manual_seed(0);
    const Gratings data = make_gratings();
    bool passed = gradients_agree<double>(data, "double", 1e-12);
    passed = gradients_agree<float>(data, "float", 1e-6) && passed;
    passed = train(data) && passed;
    return passed ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "gratings: %s\n", error.what());
    return 1;
  }
}
