// SPDX-License-Identifier: Apache-2.0
//
// Trains the network of digits.cpp on GPUs, without PyTorch: on every GPU of the machine, or on the named devices.
//
//   digits_cuda [cuda:0 cuda:1 host:0 ...]
//
// The work on the GPU and the optimizer are yours; here they are calls of Thrust. paceline decides which device
// computes which items on which stream, and combines the gradients. Only printing the loss waits for a GPU.
#include <cuda_runtime.h>
#include <thrust/device_vector.h>
#include <thrust/execution_policy.h>
#include <thrust/for_each.h>
#include <thrust/iterator/counting_iterator.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include <paceline/paceline.hpp>

#include "digits_data.hpp"
#include "mlp.hpp"

namespace {

constexpr std::size_t kTestImages = 450;
constexpr std::size_t kBatch = 512;
constexpr int kEpochs = 60;
constexpr double kGoal = 0.95;
constexpr float kLearningRate = 0.1F;
constexpr float kMomentum = 0.9F;

constexpr int kInputs = Mlp::kInputs;
constexpr int kHidden = Mlp::kHidden;
constexpr int kClasses = Mlp::kClasses;
constexpr int kBiases1 = kInputs * kHidden;
constexpr int kWeights2 = kBiases1 + kHidden;
constexpr int kBiases2 = kWeights2 + kHidden * kClasses;
constexpr int kParameters = kBiases2 + kClasses;
static_assert(kParameters == Mlp::kParameters);

// How Thrust works here: on a stream of paceline's, without waiting for it. None of the calls below allocates.
auto on(cudaStream_t stream) { return thrust::cuda::par_nosync.on(stream); }

/// What the backward pass of one image leaves for the sums over images.
struct Traces {
  float* hidden;        // [image][kHidden]
  float* hidden_error;  // [image][kHidden]
  float* error;         // [image][kClasses]
  double* loss;         // [image]
};

/// Forward and backward of one image.
struct Backward {
  const float* parameters;
  const float* pixels;
  const int* labels;
  const int* items;
  Traces traces;

  __device__ void operator()(int k) const {
    const float* const image = pixels + items[k] * kInputs;
    const int label = labels[items[k]];
    float* const hidden = traces.hidden + k * kHidden;
    float* const error = traces.error + k * kClasses;
    for (int j = 0; j < kHidden; ++j) {
      float value = parameters[kBiases1 + j];
      for (int i = 0; i < kInputs; ++i) value += image[i] * parameters[i * kHidden + j];
      hidden[j] = fmaxf(value, 0.0F);
    }
    float highest = -INFINITY;
    for (int c = 0; c < kClasses; ++c) {
      error[c] = parameters[kBiases2 + c];
      for (int j = 0; j < kHidden; ++j) error[c] += hidden[j] * parameters[kWeights2 + j * kClasses + c];
      highest = fmaxf(highest, error[c]);
    }
    float sum = 0.0F;
    for (int c = 0; c < kClasses; ++c) sum += expf(error[c] - highest);
    traces.loss[k] = static_cast<double>(logf(sum) - (error[label] - highest));
    for (int c = 0; c < kClasses; ++c) error[c] = expf(error[c] - highest) / sum - (c == label ? 1.0F : 0.0F);
    for (int j = 0; j < kHidden; ++j) {
      float back = 0.0F;
      for (int c = 0; c < kClasses; ++c) back += parameters[kWeights2 + j * kClasses + c] * error[c];
      traces.hidden_error[k * kHidden + j] = hidden[j] > 0.0F ? back : 0.0F;
    }
  }
};

/// Adds the sum over `count` images to the gradient of one parameter, or, behind the last parameter, to the loss. Each
/// sum has one order, so a micro-batch gives the same bits in every run.
struct AddSum {
  const float* pixels;
  const int* items;
  int count;
  Traces traces;
  float* gradients;
  double* loss_sum;

  __device__ void operator()(int p) const {
    if (p == kParameters) {
      for (int k = 0; k < count; ++k) *loss_sum += traces.loss[k];
      return;
    }
    float sum = 0.0F;
    for (int k = 0; k < count; ++k) sum += term(p, k);
    gradients[p] += sum;
  }
  __device__ float term(int p, int k) const {
    if (p < kBiases1) return pixels[items[k] * kInputs + p / kHidden] * traces.hidden_error[k * kHidden + p % kHidden];
    if (p < kWeights2) return traces.hidden_error[k * kHidden + p - kBiases1];
    const int q = p - kWeights2;
    if (p < kBiases2) return traces.hidden[k * kHidden + q / kClasses] * traces.error[k * kClasses + q % kClasses];
    return traces.error[k * kClasses + p - kBiases2];
  }
};

/// Gradient descent with momentum, for one parameter.
struct Update {
  float* parameters;
  float* velocity;
  const float* gradients;

  __device__ void operator()(int p) const {
    velocity[p] = kMomentum * velocity[p] + gradients[p];
    parameters[p] -= kLearningRate * velocity[p];
  }
};

template <class Function>
void for_each_index(cudaStream_t stream, std::int64_t count, const Function& function) {
  thrust::for_each_n(on(stream), thrust::make_counting_iterator(0), count, function);
}

/// The images and their order in an epoch, and room for the traces of a batch, on one device. Allocated before the
/// loop.
struct Data {
  Data(const Digits& digits, const std::vector<int>& order)
      : pixels(digits.pixels),
        labels(digits.labels),
        items(order),
        hidden(kBatch * kHidden),
        hidden_error(kBatch * kHidden),
        error(kBatch * kClasses),
        loss(kBatch) {}

  /// Adds the gradients of images to those of the replica.
  void backward(std::size_t first, std::int64_t count, const paceline::Replica& replica) {
    const Traces traces{hidden.data().get(), hidden_error.data().get(), error.data().get(), loss.data().get()};
    const int* const own = items.data().get() + first;
    for_each_index(replica.stream, count,
                   Backward{replica.parameters.data(), pixels.data().get(), labels.data().get(), own, traces});
    for_each_index(
        replica.stream, kParameters + 1,
        AddSum{pixels.data().get(), own, static_cast<int>(count), traces, replica.gradients.data(), replica.loss_sum});
  }

  thrust::device_vector<float> pixels;
  thrust::device_vector<int> labels;
  thrust::device_vector<int> items;
  thrust::device_vector<float> hidden;
  thrust::device_vector<float> hidden_error;
  thrust::device_vector<float> error;
  thrust::device_vector<double> loss;
};

void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

paceline::DeviceGroup group_of(int argc, char** argv) {
  if (argc == 1) return paceline::DeviceGroup::all(paceline::DeviceKind::cuda);
  return paceline::DeviceGroup(std::vector<std::string>(argv + 1, argv + argc));
}

int train(const paceline::DeviceGroup& group) {
  const Digits digits = read_digits(DIGITS_CSV);
  std::mt19937 random(0);  // NOLINT(cert-msc51-cpp)
  std::vector<int> order(digits.size());
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  const std::vector<int> test(order.end() - kTestImages, order.end());
  order.resize(order.size() - kTestImages);

  std::map<paceline::DeviceId, std::unique_ptr<Data>> data;
  for (const paceline::DeviceId id : group.ids()) {
    if (group.device(id).kind != paceline::DeviceKind::cuda) continue;
    check(cudaSetDevice(group.device(id).index), "cudaSetDevice");
    data[id] = std::make_unique<Data>(digits, order);
  }
  if (data.empty()) throw std::runtime_error("name a GPU at least; host devices alone are for the example digits");
  for (const paceline::Device& device : group.devices()) {
    if (device.kind != paceline::DeviceKind::cuda) continue;
    check(cudaSetDevice(device.index), "cudaSetDevice");  // the parameters live on the group's first GPU
    break;
  }

  paceline::DataParallel trainer{group, {.parameter_count = Mlp::kParameters}};
  const cudaStream_t stream = trainer.stream();
  std::vector<float> host(Mlp::kParameters);
  Mlp::initialise(host, random);
  const std::size_t bytes = host.size() * sizeof(float);
  check(cudaMemcpyAsync(trainer.parameters().data(), host.data(), bytes, cudaMemcpyDefault, stream), "copying");
  thrust::device_vector<float> velocity(Mlp::kParameters, 0.0F);
  const Update update{trainer.parameters().data(), velocity.data().get(), trainer.gradients().data()};

  for (int epoch = 1; epoch <= kEpochs; ++epoch) {
    paceline::Objective loss(0.0);  // of the last step; printing it waits for the GPUs
    for (std::size_t begin = 0; begin < order.size(); begin += kBatch) {
      const std::size_t size = std::min(kBatch, order.size() - begin);
      const auto body = [&](const paceline::MicroBatch& mb, paceline::Replica& replica) {
        const std::size_t first = begin + static_cast<std::size_t>(mb.begin);
        if (replica.stream == nullptr) {  // a host device
          double sum = 0.0;
          for (std::size_t k = first; k < first + static_cast<std::size_t>(mb.size()); ++k) {
            const auto item = static_cast<std::size_t>(order[k]);
            sum += Mlp::backward(replica.parameters, replica.gradients, digits.image(item), digits.labels[item]);
          }
          return sum;
        }
        data.at(replica.device)->backward(first, mb.size(), replica);  // enqueues, and waits for nothing
        return 0.0;
      };
      loss = trainer.step(static_cast<std::int64_t>(size), body);
      for_each_index(stream, kParameters, update);
    }
    if (epoch % 10 == 0) std::printf("epoch %3d  loss %7.4f\n", epoch, loss.value());
  }

  check(cudaMemcpyAsync(host.data(), trainer.parameters().data(), bytes, cudaMemcpyDefault, stream), "copying");
  check(cudaStreamSynchronize(stream), "waiting for the parameters");
  const auto right = std::count_if(test.begin(), test.end(), [&](int index) {
    const auto item = static_cast<std::size_t>(index);
    return Mlp::classify(host, digits.image(item)) == digits.labels[item];
  });
  const double accuracy = static_cast<double>(right) / static_cast<double>(kTestImages);
  std::printf("\n%s\ntest accuracy: %.1f%% of %zu images that it was not trained on\n", trainer.explain().c_str(),
              100.0 * accuracy, kTestImages);
  return accuracy < kGoal ? 1 : 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return train(group_of(argc, argv));
  } catch (const paceline::Unavailable& error) {
    std::printf("skipped: %s\n", error.what());
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "digits_cuda: %s\n", error.what());
    return 1;
  }
}
