// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include <paceline/runtime/device_health.hpp>

#include "nvml_library.hpp"

namespace paceline::cuda {

/// A GPU by what CUDA and NVML both call it: their numbers differ under CUDA_VISIBLE_DEVICES and by order.
struct GpuAddress {
  std::string name;        ///< "cuda:1"
  std::string pci_bus_id;  ///< "0000:41:00.0"
};

/// What NVML says about `gpu`, and how it reaches `others`. What the library or the GPU does not know stays empty.
/// Nothing at all without the library, or if it does not know the GPU.
[[nodiscard]] std::optional<DeviceHealth> read_nvml(const NvmlLibrary& library, const GpuAddress& gpu,
                                                    std::span<const GpuAddress> others);

/// The health of a device of the CUDA backend, by the process's NVML. Throws nothing but what the poll hook of waits
/// does.
[[nodiscard]] std::optional<DeviceHealth> gpu_health(const Device& device);
[[nodiscard]] HealthSource nvml_source();

/// The fields that hold the times of software_thermal, hardware_thermal and power_brake in the NVML of that driver
/// ("580.65.06"); zero: none.
[[nodiscard]] std::array<std::uint32_t, 3> thermal_fields(std::string_view driver_version) noexcept;

/// Which of the processes on a GPU are not this one. In a container their numbers are those of the host, where nobody
/// knows ours (`numbers_are_ours` false): then one of them is taken to be us, and the memory of the rest is unknown.
[[nodiscard]] OtherProcesses others_among(std::span<const NvmlProcess> processes, std::uint32_t own_pid,
                                          bool numbers_are_ours);

}  // namespace paceline::cuda
