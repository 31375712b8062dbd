// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <vector>

#include <paceline/sim/data_path.hpp>

namespace paceline::sim {

/// Streams of GPUs on a virtual clock: each runs its operations in order. Copies that run at once share the links.
class StreamMachine {
 public:
  using Event = std::size_t;

  StreamMachine(std::size_t stream_count, std::size_t gpu_count, const LinkSpeeds& links);

  void compute(std::size_t stream, double seconds);
  /// Between two GPUs.
  void copy(std::size_t stream, std::size_t from, std::size_t to, double bytes);
  [[nodiscard]] Event record(std::size_t stream);
  void wait(std::size_t stream, Event event);

  /// Runs everything.
  void run();
  /// After run(): when the stream came to it.
  [[nodiscard]] double time_of(Event event) const { return times_[event]; }

 private:
  enum class Kind { compute, copy, record, wait };
  struct Operation {
    Kind kind = Kind::compute;
    double left = 0.0;     // seconds, or of a copy bytes
    double latency = 0.0;  // seconds that are left before a copy's first byte
    std::size_t from = 0;
    std::size_t to = 0;
    Event event = 0;
    double rate = 0.0;
  };
  struct Stream {
    std::vector<Operation> operations;
    std::size_t next = 0;
    [[nodiscard]] bool done() const { return next == operations.size(); }
  };

  /// Does all that takes no time.
  void pass();
  void share_links();

  std::vector<Stream> streams_;
  std::size_t gpu_count_;
  LinkSpeeds links_;
  std::vector<double> times_;  // of events; negative: not yet
  double now_ = 0.0;
};

}  // namespace paceline::sim
