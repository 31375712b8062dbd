// SPDX-License-Identifier: Apache-2.0
//
// Trains a small network on handwritten digits, over all devices of this machine, with the C++ API alone.
//
//   digits [digits.csv [epochs]]
//
// paceline provides a group of devices and a trainer that owns the flat parameters. The body adds the gradient of some
// items of the batch on one device. The network (mlp.hpp) and the optimizer are yours.
#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <paceline/paceline.hpp>

#include "digits_data.hpp"
#include "mlp.hpp"

namespace {

constexpr std::size_t kTestImages = 450;
constexpr std::size_t kBatch = 512;
constexpr int kEpochs = 60;
constexpr int kEpochsPerRow = 10;
constexpr double kGoal = 0.95;  // on the test set; the network reaches 97 to 98 %
constexpr float kLearningRate = 0.1F;
constexpr float kMomentum = 0.9F;

/// Prints how many items each device has run since the last row.
class Table {
 public:
  explicit Table(const paceline::DeviceGroup& group) : group_(group), devices_(group.ids()) {
    std::printf("%6s  %7s  %7s   %-8s %6s  %9s  %5s\n", "epoch", "loss", "ms/step", "device", "share", "items/s",
                "busy");
  }

  void add(const paceline::StepRecord& step, double loss) {
    for (const paceline::ClaimRecord& claim : step.claims) {
      Totals& device = devices_[claim.micro_batch.device];
      device.items += static_cast<double>(claim.micro_batch.size());
      device.busy_seconds += claim.finish_seconds - claim.start_seconds;
    }
    seconds_ += step.step_seconds;
    loss_ = loss;
    ++steps_;
  }

  void row(int epoch) {
    for (auto& [id, device] : devices_) {
      if (id == 0) {
        std::printf("%6d  %7.4f  %7.2f   ", epoch, loss_, 1e3 * seconds_ / steps_);
      } else {
        std::printf("%27s", "");
      }
      const double rate = device.busy_seconds > 0.0 ? device.items / device.busy_seconds : 0.0;
      std::printf("%-8s %6.0f  %9.0f  %4.0f%%\n", group_.device(id).name.c_str(), device.items / steps_, rate,
                  100.0 * device.busy_seconds / seconds_);
      device = {};
    }
    seconds_ = 0.0;
    steps_ = 0;
  }

 private:
  struct Totals {
    double items = 0.0;
    double busy_seconds = 0.0;
  };

  paceline::DeviceGroup group_;
  paceline::PerDevice<Totals> devices_;
  double seconds_ = 0.0;
  double loss_ = 0.0;
  int steps_ = 0;
};

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

  paceline::DataParallel trainer{paceline::DeviceGroup::all(paceline::DeviceKind::host),
                                 {.parameter_count = Mlp::kParameters}};
  Mlp::initialise(trainer.parameters(), random);
  std::vector<float> velocity(Mlp::kParameters);
  Table table(trainer.group());

  for (int epoch = 1; epoch <= epochs; ++epoch) {
    std::shuffle(order.begin(), order.end(), random);
    for (std::size_t begin = 0; begin < order.size(); begin += kBatch) {
      const std::size_t size = std::min(kBatch, order.size() - begin);

      // Called on the devices' threads, each with its own items and its own gradients. The parameters are shared.
      const auto body = [&](const paceline::MicroBatch& micro_batch, paceline::Replica& replica) {
        double loss = 0.0;
        for (std::int64_t item = micro_batch.begin; item < micro_batch.end; ++item) {
          const std::size_t index = order[begin + static_cast<std::size_t>(item)];
          loss += Mlp::backward(replica.parameters, replica.gradients, digits.image(index), digits.labels[index]);
        }
        return loss;
      };
      const double loss = trainer.step(static_cast<std::int64_t>(size), body).value();

      // gradients() is the mean over the whole batch, for any split.
      trainer.update([&](std::size_t first, std::size_t last) {
        for (std::size_t i = first; i < last; ++i) {
          velocity[i] = kMomentum * velocity[i] + trainer.gradients()[i];
          trainer.parameters()[i] -= kLearningRate * velocity[i];
        }
      });
      table.add(trainer.last_step(), loss);
    }
    if (epoch % kEpochsPerRow == 0 || epoch == epochs) table.row(epoch);
  }

  const auto right = std::count_if(test.begin(), test.end(), [&](std::size_t index) {
    return Mlp::classify(trainer.parameters(), digits.image(index)) == digits.labels[index];
  });
  const double accuracy = static_cast<double>(right) / static_cast<double>(kTestImages);
  std::printf("\n%s\n", trainer.explain().c_str());
  std::printf("test accuracy: %.1f%% of %zu images that it was not trained on\n", 100.0 * accuracy, kTestImages);
  if (accuracy < kGoal && epochs >= kEpochs) {
    std::fprintf(stderr, "that is less than the %.0f%% which this network reaches\n", 100.0 * kGoal);
    return 1;
  }
  return 0;
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
    std::fprintf(stderr, "usage: digits [digits.csv [epochs]]\n");
    return 2;
  }
  try {
    return train(path, epochs);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "digits: %s\n", error.what());
    return 1;
  }
}
