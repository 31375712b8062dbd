// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <paceline/runtime/backend.hpp>

namespace paceline {

/// NVIDIA's GPUs: cuda:0, cuda:1, ... in the order of CUDA_VISIBLE_DEVICES. find() also knows their parts. Without a
/// driver the list is empty.
class CudaBackend final : public Backend {
 public:
  [[nodiscard]] DeviceKind kind() const noexcept override { return DeviceKind::cuda; }
  [[nodiscard]] std::string_view prefix() const noexcept override { return "cuda"; }
  [[nodiscard]] std::vector<Device> devices() const override;
  [[nodiscard]] std::string why_none() const override;
  [[nodiscard]] Device find(std::string_view name) const override;
  void prepare_worker(const Device& device) const noexcept override;
  [[nodiscard]] bool asynchronous() const noexcept override { return true; }
  [[nodiscard]] std::string why_in_turns() const override;
  [[nodiscard]] std::unique_ptr<AsyncDevice> open(const Device& device) const override;
  [[nodiscard]] std::vector<DeviceHealth> health(std::span<const Device> devices) const override;
  [[nodiscard]] std::vector<Device> partition(const Device& device, std::span<const double> fractions) const override;
  void release_partitions(const Device& device, std::chrono::nanoseconds timeout) const override;
  [[nodiscard]] std::vector<GpuFacts> gpu_facts() const override;
};

}  // namespace paceline
