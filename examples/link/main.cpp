// SPDX-License-Identifier: Apache-2.0
//
// Fits y = a x + b by gradient descent on all host devices of this machine.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <span>
#include <vector>

#include <paceline/paceline.hpp>

namespace {

constexpr std::int64_t kItems = 1'000'000;  // a step of less than a millisecond is over before a second device begins
constexpr int kSteps = 200;
constexpr double kRate = 0.5;

double x_of(std::int64_t item) { return 2.0 * static_cast<double>(item) / kItems - 1.0; }
double y_of(std::int64_t item) { return 3.0 * x_of(item) - 2.0; }

}  // namespace

int main() {
  try {
    paceline::DeviceGroup group = paceline::DeviceGroup::all(paceline::DeviceKind::host);
    paceline::BasicDataParallel<double> trainer{group, {.parameter_count = 2}};

    // Runs on the workers. Adds the gradient of the sum over some items, and returns the sum of their losses.
    const auto body = [](const paceline::MicroBatch& items, paceline::BasicReplica<double>& replica) {
      double loss = 0.0;
      for (std::int64_t item = items.begin; item < items.end; ++item) {
        const double error = replica.parameters[0] * x_of(item) + replica.parameters[1] - y_of(item);
        replica.gradients[0] += error * x_of(item);
        replica.gradients[1] += error;
        loss += 0.5 * error * error;
      }
      return loss;
    };

    paceline::Objective loss(0.0);  // of the last step; on GPUs only reading it waits
    for (int step = 0; step < kSteps; ++step) {
      loss = trainer.step(kItems, body);
      const std::span<double> parameters = trainer.parameters();
      for (std::size_t i = 0; i < parameters.size(); ++i) parameters[i] -= kRate * trainer.gradients()[i];
    }

    const std::span<const double> fitted = trainer.parameters();
    std::printf("y = %.3f x %+.3f, loss %.1e, on %zu devices\n", fitted[0], fitted[1], loss.value(), group.size());
    std::printf("%s\n", trainer.explain().c_str());
    return std::abs(fitted[0] - 3.0) < 1e-3 && std::abs(fitted[1] + 2.0) < 1e-3 ? 0 : 1;
  } catch (const paceline::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
