// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/Parallel.h>
#include <torch/nn/module.h>
#include <torch/types.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include <paceline/paceline.hpp>

/// How many elements the parameters of `module` have together: the parameter_count of its trainer.
inline std::size_t parameter_count(const torch::nn::Module& module) {
  std::int64_t count = 0;
  for (const torch::Tensor& parameter : module.parameters()) count += parameter.numel();
  return static_cast<std::size_t>(count);
}

/// Copies the parameters of `module` to flat memory, in the order of module.parameters().
/// @throws c10::Error if a parameter is not of type T.
template <class T>
void copy_parameters(const torch::nn::Module& module, std::span<T> memory) {
  T* to = memory.data();
  for (const torch::Tensor& parameter : module.parameters()) {
    to = std::copy_n(parameter.contiguous().const_data_ptr<T>(), parameter.numel(), to);
  }
}

/// Makes the parameters of `module` views of `parameters`, in the order of module.parameters(), and their gradients
/// views of `gradients`. Copies nothing.
///
/// Autograd adds in place to a gradient that is there, so backward() adds to this memory. It would allocate another
/// gradient after zero_grad(), or if it created a graph. Do neither: the trainer clears its memory by itself.
template <class T>
void use_memory(torch::nn::Module& module, std::span<T> parameters, std::span<T> gradients) {
  std::size_t begin = 0;
  for (torch::Tensor& parameter : module.parameters()) {
    const std::vector<std::int64_t> shape = parameter.sizes().vec();
    parameter.set_data(torch::from_blob(&parameters[begin], shape, torch::CppTypeToScalarType<T>::value));
    parameter.mutable_grad() = torch::from_blob(&gradients[begin], shape, torch::CppTypeToScalarType<T>::value);
    begin += static_cast<std::size_t>(parameter.numel());
  }
}

/// One module for each device of a trainer on host devices, because backward() writes gradients to the module that it
/// runs on. All modules have the trainer's parameters. Each has its own buffers, such as the statistics of BatchNorm,
/// which nothing brings together.
///
/// Threads: workers may call of() at the same time, because each touches only its own module. Destroy before the
/// trainer, whose memory the modules use.
template <class Module, class T>
class DeviceModules {
 public:
  /// Call it on the thread that will call step(). `make` returns a new module; the values of its parameters do not
  /// matter.
  DeviceModules(const paceline::DeviceGroup& group, const std::function<std::shared_ptr<Module>()>& make) {
    // The devices are the parallelism. libtorch's other threads would compete with the workers for the same cores, and
    // those of the calling thread spin for a while after each operator.
    at::set_num_threads(1);
    for (const paceline::DeviceId id : group.ids()) devices_.add(id, {.module = make()});
  }

  /// The module for a micro-batch of this replica. Call it on the worker that runs the micro-batch.
  Module& of(const paceline::BasicReplica<T>& replica) {
    Device& device = devices_[replica.device];
    if (device.gradients != replica.gradients.data()) {
      at::set_num_threads(1);  // the number belongs to a thread
      // libtorch has no tensors of constants. Nothing writes to the parameters during a step.
      const std::span<T> parameters(const_cast<T*>(replica.parameters.data()), replica.parameters.size());
      use_memory(*device.module, parameters, replica.gradients);
      device.gradients = replica.gradients.data();
    }
    return *device.module;
  }

 private:
  struct Device {
    std::shared_ptr<Module> module;
    const T* gradients = nullptr;  ///< where the module's gradients lie
  };
  paceline::PerDevice<Device> devices_;
};
