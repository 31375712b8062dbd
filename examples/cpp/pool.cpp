// SPDX-License-Identifier: Apache-2.0
//
// Classifies handwritten digits by their nearest neighbours, on all host devices: trials of a search as independent
// jobs of a pool, then requests that the pool answers in batches.
//
//   pool [digits.csv]
//
// One job for each number of neighbours finds how well it does on a part of the training images. A job that comes after
// them all picks the best. Then each test image is a request.
#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <exception>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <paceline/paceline.hpp>

#include "digits_data.hpp"

namespace {

constexpr std::size_t kTestImages = 450;
constexpr std::size_t kValidationImages = 300;
constexpr std::size_t kMostNeighbours = 9;
constexpr double kGoal = 0.92;  // on the test set; seven neighbours reach 94 %

/// The label that most of the nearest images in [begin, end) have.
int classify(const Digits& digits, std::size_t image, std::size_t begin, std::size_t end, std::size_t neighbours) {
  std::vector<std::pair<float, int>> found;
  for (std::size_t other = begin; other < end; ++other) {
    float distance = 0.0F;
    for (std::size_t p = 0; p < Digits::kPixels; ++p) {
      const float difference = digits.image(image)[p] - digits.image(other)[p];
      distance += difference * difference;
    }
    found.emplace_back(distance, digits.labels[other]);
  }
  const auto last = found.begin() + static_cast<std::ptrdiff_t>(neighbours);
  std::nth_element(found.begin(), last - 1, found.end());
  std::array<int, 10> votes{};
  for (auto one = found.begin(); one != last; ++one) ++votes.at(static_cast<std::size_t>(one->second));
  return static_cast<int>(std::max_element(votes.begin(), votes.end()) - votes.begin());
}

int run(const std::string& path) {
  const Digits digits = read_digits(path);
  if (digits.size() < kTestImages + kValidationImages + kMostNeighbours) throw std::runtime_error("too few images");
  const std::size_t train = kTestImages + kValidationImages;  // the images from here on
  std::vector<double> accuracy(kMostNeighbours + 1);

  paceline::Pool pool{paceline::DeviceGroup::all(paceline::DeviceKind::host)};
  std::vector<paceline::JobHandle> trials;
  for (std::size_t neighbours = 1; neighbours <= kMostNeighbours; ++neighbours) {
    const auto trial = [&, neighbours](paceline::Job&) {
      std::size_t right = 0;
      for (std::size_t image = kTestImages; image < train; ++image)
        right += classify(digits, image, train, digits.size(), neighbours) == digits.labels[image] ? 1U : 0U;
      accuracy[neighbours] = static_cast<double>(right) / kValidationImages;
    };
    trials.push_back(pool.submit(trial, {.kind = "trial", .priority = paceline::Priority::batch}));
  }
  const auto pick = [&](paceline::Job&) {
    return static_cast<std::size_t>(std::max_element(accuracy.begin(), accuracy.end()) - accuracy.begin());
  };
  const std::size_t best = pool.submit(pick, {.kind = "pick", .after = trials}).get();
  for (std::size_t neighbours = 1; neighbours <= kMostNeighbours; ++neighbours)
    std::printf("%zu neighbours: %.1f %%%s\n", neighbours, 100 * accuracy[neighbours],
                neighbours == best ? ", the best" : "");

  const auto answer = [&](paceline::Job&, std::span<std::size_t> images, std::span<int> labels) {
    for (std::size_t k = 0; k < images.size(); ++k)
      labels[k] = classify(digits, images[k], kTestImages, digits.size(), best);
  };
  const auto server = pool.serve<std::size_t, int>(answer, {.max_batch = 16});
  const auto begin = std::chrono::steady_clock::now();
  std::vector<paceline::Future<int>> answers;
  for (std::size_t image = 0; image < kTestImages; ++image) answers.push_back(server.submit(image));
  std::size_t right = 0;
  for (std::size_t image = 0; image < kTestImages; ++image)
    right += answers[image].get() == digits.labels[image] ? 1U : 0U;
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  const double found = static_cast<double>(right) / kTestImages;
  std::printf("\n%.0f requests/s, %.1f %% of %zu test images right\n\n%s", kTestImages / seconds, 100 * found,
              kTestImages, pool.explain().c_str());
  if (found >= kGoal) return 0;
  std::fprintf(stderr, "pool: less than %.0f %% of the test images are right\n", 100 * kGoal);
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 2) {
    std::fprintf(stderr, "usage: pool [digits.csv]\n");
    return 2;
  }
  try {
    return run(argc > 1 ? argv[1] : DIGITS_CSV);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "pool: %s\n", error.what());
    return 1;
  }
}
