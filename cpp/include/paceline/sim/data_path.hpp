// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include <paceline/export.hpp>

namespace paceline::sim {

/// The links of a box of equal GPUs. A GPU's copies from and to all others share its port.
struct LinkSpeeds {
  double pair_bytes_per_second = 0.0;  ///< from one GPU to another, one direction
  double port_bytes_per_second = 0.0;  ///< out of one GPU, or into it
  double host_bytes_per_second = 0.0;  ///< all copies together, where they go through the host; 0: no limit
  double latency_seconds = 0.0;        ///< from the launch of a copy to its first byte
};

/// "nvlink4", "nvlink5", "pcie4", "pcie5", or "host": PCIe 4 without peer access. What is assumed of them stands in the
/// source. @throws InvalidArgument for another name, with the names that there are.
[[nodiscard]] PACELINE_API LinkSpeeds link_speeds(const std::string& name);

/// How many operators of forward and backward a second so many threads of one Python process start together. Measured
/// on one host with 1, 2, 4 and 8 threads, in between by the logarithm of their number, beyond as with 8.
[[nodiscard]] PACELINE_API double launch_rate(std::size_t threads);

/// A data parallel step on equal GPUs, without the balancer: all shares are equal and nothing varies.
struct DataPathOptions {
  std::size_t gpus = 8;
  double parameters = 1e9;
  double bytes_each = 2.0;  ///< of a parameter, and of its gradient
  double forward_seconds = 0.0;
  double backward_seconds = 0.0;
  double update_seconds = 0.0;  ///< the optimizer over all parameters, on one GPU
  double bucket_bytes = 25.0 * (1 << 20);
  std::size_t pieces = 120;  ///< in which the serial way sends the parameters to a GPU
  double memory_bytes_per_second = 2.7e12;
  double launch_seconds = 4e-6;  ///< a kernel, however small
  double operators = 0.0;  ///< that a step starts on each GPU; 0: starting them takes no time, as with CUDA graphs
  LinkSpeeds links{};
};

/// What a way takes from the beginning of one step to that of the next, in the steady state.
struct DataPathOutcome {
  std::string way;
  double step_seconds = 0.0;
  double exposed_seconds = 0.0;  ///< beyond forward, backward and update
};

/// Runs five ways on a virtual clock. Backward and forward come to the buckets at an even pace, backward in the reverse
/// order. Copies that run at once share ports fairly (max-min).
///
///   serial      Flat gradients after the last micro-batch, pulled by the first GPU one after the other and summed
///   there.
///               It updates the parameters and sends them in pieces, before the next forward.
///   buckets     Each GPU but the first one sums a slice of each bucket while backward goes on, and the first one pulls
///               the sums; of two GPUs the first one sums. It updates the parameters. The second GPU pulls each bucket
///               of them, the third one from the second one, and so on. Forward waits for each bucket.
///   ranges      Like buckets, with a sharded optimizer: each GPU pulls a range of the gradients and the parameters
///   from
///               the first GPU and updates it. The first GPU pulls the results.
///   sharded     Each GPU updates the slices that it has summed, and the others pull them bucket by bucket.
///   ring        PyTorch's DDP: a ring all-reduce of each bucket while backward goes on; every GPU updates everything.
///
/// A thread for each GPU starts its operators and never waits for a GPU, so a step takes at least as long as that. The
/// threads are those of one process, but for the ring, which has a process for each GPU.
///
/// @throws InvalidArgument for options that are not positive, or a single GPU.
[[nodiscard]] PACELINE_API std::vector<DataPathOutcome> simulate_data_path(const DataPathOptions& options);

}  // namespace paceline::sim
