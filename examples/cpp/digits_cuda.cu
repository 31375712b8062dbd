// SPDX-License-Identifier: Apache-2.0
//
// Trains the network of digits.cpp on GPUs, without PyTorch: on every GPU of the machine, or on the named devices.
//
//   digits_cuda [cuda:0 cuda:1 host:0 ...]
//
// The kernels and the optimizer are yours. paceline decides which device computes which items on which stream, and
// combines the gradients. Only printing the loss waits for a GPU.
#include <cuda_runtime.h>

#include <algorithm>
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

void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

/// Forward and backward of one image by one block, with a thread per hidden unit.
__global__ void backward_kernel(const float* parameters, float* gradients, double* loss_sum, const float* pixels,
                                const int* labels, const int* items) {
  __shared__ float image[kInputs];
  __shared__ float hidden[kHidden];
  __shared__ float error[kClasses];
  const int j = static_cast<int>(threadIdx.x);
  const int item = items[blockIdx.x];
  if (j < kInputs) image[j] = pixels[item * kInputs + j];
  __syncthreads();
  float value = parameters[kBiases1 + j];
  for (int i = 0; i < kInputs; ++i) value += image[i] * parameters[i * kHidden + j];
  hidden[j] = fmaxf(value, 0.0F);
  __syncthreads();
  if (j < kClasses) {
    float score = parameters[kBiases2 + j];
    for (int k = 0; k < kHidden; ++k) score += hidden[k] * parameters[kWeights2 + k * kClasses + j];
    error[j] = score;
  }
  __syncthreads();
  if (j == 0) {
    float highest = error[0];
    for (int c = 1; c < kClasses; ++c) highest = fmaxf(highest, error[c]);
    float sum = 0.0F;
    for (int c = 0; c < kClasses; ++c) sum += expf(error[c] - highest);
    atomicAdd(loss_sum, static_cast<double>(logf(sum) - (error[labels[item]] - highest)));
    for (int c = 0; c < kClasses; ++c) {
      error[c] = expf(error[c] - highest) / sum - (c == labels[item] ? 1.0F : 0.0F);
      atomicAdd(&gradients[kBiases2 + c], error[c]);
    }
  }
  __syncthreads();
  if (hidden[j] <= 0.0F) return;
  float hidden_error = 0.0F;
  for (int c = 0; c < kClasses; ++c) {
    hidden_error += parameters[kWeights2 + j * kClasses + c] * error[c];
    atomicAdd(&gradients[kWeights2 + j * kClasses + c], hidden[j] * error[c]);
  }
  atomicAdd(&gradients[kBiases1 + j], hidden_error);
  for (int i = 0; i < kInputs; ++i) atomicAdd(&gradients[i * kHidden + j], image[i] * hidden_error);
}

__global__ void update_kernel(float* parameters, float* velocity, const float* gradients, int count) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= count) return;
  velocity[i] = kMomentum * velocity[i] + gradients[i];
  parameters[i] -= kLearningRate * velocity[i];
}

/// Memory on the current device.
template <class T>
class OnGpu {
 public:
  explicit OnGpu(const std::vector<T>& values) {
    check(cudaMalloc(&data_, values.size() * sizeof(T)), "cudaMalloc");
    check(cudaMemcpy(data_, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  ~OnGpu() { cudaFree(data_); }
  OnGpu(const OnGpu&) = delete;
  OnGpu& operator=(const OnGpu&) = delete;
  [[nodiscard]] T* get() const { return data_; }

 private:
  T* data_ = nullptr;
};

/// The images and their order in an epoch, on one GPU.
struct Data {
  Data(const Digits& digits, const std::vector<int>& order)
      : pixels(digits.pixels), labels(digits.labels), items(order) {}
  OnGpu<float> pixels;
  OnGpu<int> labels;
  OnGpu<int> items;
};

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

  std::map<std::string, std::unique_ptr<Data>> data;  // by memory space
  for (const paceline::Device& device : group.devices()) {
    if (device.kind != paceline::DeviceKind::cuda || data.contains(device.memory_space)) continue;
    check(cudaSetDevice(device.index), "cudaSetDevice");
    data[device.memory_space] = std::make_unique<Data>(digits, order);
  }
  if (data.empty()) throw std::runtime_error("name a GPU at least; host devices alone are for the example digits");
  for (const paceline::Device& device : group.devices()) {
    if (device.kind != paceline::DeviceKind::cuda) continue;
    check(cudaSetDevice(device.index), "cudaSetDevice");  // the parameters live on the group's first GPU
    break;
  }

  paceline::DataParallel trainer{group, {.parameter_count = Mlp::kParameters}};
  const auto stream = static_cast<cudaStream_t>(trainer.stream());
  std::vector<float> host(Mlp::kParameters);
  Mlp::initialise(host, random);
  const std::size_t bytes = host.size() * sizeof(float);
  check(cudaMemcpyAsync(trainer.parameters().data(), host.data(), bytes, cudaMemcpyDefault, stream), "copying");
  const OnGpu<float> velocity(std::vector<float>(Mlp::kParameters, 0.0F));

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
        const Data& here = *data.at(group.devices()[replica.device].memory_space);
        backward_kernel<<<static_cast<unsigned int>(mb.size()), kHidden, 0,
                          static_cast<cudaStream_t>(replica.stream)>>>(
            replica.parameters.data(), replica.gradients.data(), replica.loss_sum, here.pixels.get(), here.labels.get(),
            here.items.get() + first);
        check(cudaGetLastError(), "launching backward_kernel");
        return 0.0;
      };
      loss = trainer.step(static_cast<std::int64_t>(size), body);
      constexpr int count = static_cast<int>(Mlp::kParameters);
      update_kernel<<<(count + 255) / 256, 256, 0, stream>>>(trainer.parameters().data(), velocity.get(),
                                                             trainer.gradients().data(), count);
      check(cudaGetLastError(), "launching update_kernel");
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
