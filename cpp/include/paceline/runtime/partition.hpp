// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <initializer_list>
#include <span>
#include <string_view>
#include <vector>

#include <paceline/export.hpp>
#include <paceline/runtime/device.hpp>

namespace paceline {

/// Splits a GPU into parts that are devices of their own: `cuda:0/0`, `cuda:0/1`, ... in the memory space `cuda:0`.
/// Work on a part's streams runs only on the part's streaming multiprocessors (SMs), beside the other parts.
///
///   const std::vector<paceline::Device> parts = paceline::partition("cuda:0", {0.75, 0.25});
///   paceline::DeviceGroup group(parts);                       // parts[0].sm_count == 88 of an H200's 132
///   ...                                                       // train; drop what uses the parts
///   paceline::release_partitions("cuda:0");
///
/// Rounding: CUDA deals out SMs in groups of equal size (8 on compute capability 9.0 and newer). SMs beyond whole
/// groups stay unused. Each fraction of the groups is rounded down. The groups left over go to the parts that lost most
/// by rounding; equal fractions get equal numbers. Device::sm_count is what a part got, Device::fraction what was asked
/// for.
///
/// A GPU has one split at a time in the whole process, and its parts share no SM. A second call with the same split
/// returns the same devices, also if other fractions lead to the same SMs. A different split replaces the old one if
/// nothing uses the old one any more, and is refused otherwise. Thread-safe.
///
/// Parts share the GPU's memory, memory bandwidth, L2 cache, clock and copy engines. Kernels of two parts are likely to
/// run at the same time, but CUDA does not promise it.
///
/// @throws InvalidArgument if a fraction is not positive and finite, if the fractions sum to more than 1, if one is too
/// small for a group (the message gives the smallest possible), if the device is itself a part, or if another split is
/// in use.
/// @throws Unavailable for a device that cannot be split (host:0), or if the driver is too old, naming the version.
[[nodiscard]] PACELINE_API std::vector<Device> partition(std::string_view device, std::span<const double> fractions);
[[nodiscard]] PACELINE_API std::vector<Device> partition(std::string_view device,
                                                         std::initializer_list<double> fractions);

/// Ends the split of that GPU. Without a split it does nothing. It waits for work left on streams of the parts that
/// were already dropped.
///
/// Drop everything on the parts first, in this order: tensors computed there; then, if PyTorch ran there, its cuBLAS
/// workspaces and cached memory (torch.cuda.empty_cache()), which remember the streams; then the owners of the streams:
/// trainers, streams and buffers of AsyncDevice.
/// @throws InvalidArgument if a part is still in use, naming it; Timeout if its work does not end. The split then
/// stays.
PACELINE_API void release_partitions(std::string_view device,
                                     std::chrono::nanoseconds timeout = std::chrono::seconds(10));

}  // namespace paceline
