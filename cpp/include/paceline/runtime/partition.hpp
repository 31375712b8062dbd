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
/// Work on a part's streams runs on its streaming multiprocessors (SMs) alone, beside the other parts.
///
///   const std::vector<paceline::Device> parts = paceline::partition("cuda:0", {0.75, 0.25});
///   paceline::DeviceGroup group(parts);                       // parts[0].sm_count == 96 of an H100's 132
///   ...                                                       // train; drop what uses the parts
///   paceline::release_partitions("cuda:0");
///
/// Rounding: CUDA deals SMs out in groups of equal size (8 on compute capability 9.0 and newer), and what is left
/// beyond whole groups to nobody. A fraction is of the groups: it is rounded down, and the groups that are then left
/// over go to the parts that lost most, parts of equal fractions alike. Device::sm_count says what a part got,
/// Device::fraction what was asked for.
///
/// One split of a GPU at a time, for the whole process: its parts share no SM. Asked for again, the same split gives
/// the same devices, and so do other fractions that come to the same SMs. A different split takes the place of the old
/// one if nothing uses that any more, and is refused otherwise. Thread-safe.
///
/// What a part does not limit: memory, its bandwidth, the L2 cache, the clock and the copy engines are the whole GPU's.
/// That kernels of two parts run at the same time is likely, yet nothing that CUDA promises.
///
/// @throws InvalidArgument if a fraction is not positive and finite, if they sum to more than 1, if one is too small
/// for
///   a group (saying the smallest that is possible), if the device is itself a part, or if another split is in use.
/// @throws Unavailable for a device that has no parts (host:0), or with a driver that is too old, naming the version.
[[nodiscard]] PACELINE_API std::vector<Device> partition(std::string_view device, std::span<const double> fractions);
[[nodiscard]] PACELINE_API std::vector<Device> partition(std::string_view device,
                                                         std::initializer_list<double> fractions);

/// Ends the split of that GPU; without one nothing happens. Waits for the work that streams of the parts still had when
/// they were dropped.
///
/// Everything on the parts must have been dropped before, in this order: tensors that were computed there; then, where
/// PyTorch ran on them, its cuBLAS workspaces and cached memory (torch.cuda.empty_cache()), which remember the streams;
/// then what holds the streams: trainers, streams and buffers of AsyncDevice.
/// @throws InvalidArgument if a part is still in use, naming it; Timeout if its work does not end. The split then
/// stays.
PACELINE_API void release_partitions(std::string_view device,
                                     std::chrono::nanoseconds timeout = std::chrono::seconds(10));

}  // namespace paceline
