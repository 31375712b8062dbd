// SPDX-License-Identifier: Apache-2.0
//
// Collectives of devices that work after the call. Each memory space has one stream, and all its work is enqueued there
// in program order, so NCCL sees the same order on every GPU. The link moves data between spaces; the code here works
// inside one space. The order of the work:
//
//   1. A buffer is first used after the work that its owner's stream has: enter() makes the space's stream wait.
//   2. What the owner enqueues next runs after the last use of the buffer, by any space: leave() makes the owner's
//      stream wait for all spaces.
//   3. The host reads a result, or uses pinned memory again, after the devices' work: the caller waits.
#include <fmt/format.h>
#include <unistd.h>

#include <cstdint>
#include <initializer_list>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <paceline/error.hpp>

#include "comm/collectives.hpp"
#include "comm/host_side.hpp"
#include "comm/link.hpp"
#include "comm/memory_spaces.hpp"
#include "runtime/deadline.hpp"

namespace paceline::internal {
namespace {

std::size_t bytes_of(const BufferView& view) { return view.count * size_of(view.dtype); }

/// NCCL loads whole elements.
bool aligned(const BufferView& view) { return reinterpret_cast<std::uintptr_t>(view.data) % size_of(view.dtype) == 0; }

/// A reduction over all devices in three stages: inside each memory space, between spaces, and what remains.
///
/// Only a mean has a choice of stage. Floating-point elements are divided in the first stage: that costs no extra pass
/// and keeps half types from overflowing. Integers are divided in the last stage, because the sum must be complete.
struct Stages {
  Stages(ReduceOp op, DType dtype, bool crosses)
      : between(op == ReduceOp::mean ? ReduceOp::sum : op),
        last(op),
        first(crosses && (dtype == DType::int32 || dtype == DType::int64) ? between : op) {}

  ReduceOp between;
  ReduceOp last;
  ReduceOp first;
};

class AsyncCollectives final : public Collectives {
 public:
  AsyncCollectives(DeviceGroup group, const CommunicatorOptions& options)
      : group_(std::move(group)), options_(options), owner_(getpid()), memory_(group_), host_(group_, memory_) {
    description_ = fmt::format("the memory of {}", memory_.home().endpoint.device.memory_space);
    if (memory_.spaces().size() == 1) return;
    link_ = make_link(memory_.endpoints(), options);
    description_ = link_->description();
    if (!link_->accesses_peers()) description_ += ", " + memory_.routes();
  }

  ~AsyncCollectives() override {
    if (getpid() != owner_) {  // a child must not touch the devices, which do not survive fork()
      static_cast<void>(link_.release());
      memory_.leak();
      return;
    }
    try {
      close();
    } catch (...) {  // what hangs is left behind, as close() says; a destructor cannot report it
    }
  }

  void all_reduce(std::span<const BufferView> buffers, ReduceOp op) override {
    const auto lock = begin("all_reduce");
    const BufferView& like = buffers.front();
    const Stages stages(op, like.dtype, link_ != nullptr);
    memory_.enter(buffers);
    run({buffers}, [&] {
      const HostPart hosts = host_.bring_in(buffers, op);
      std::vector<void*> results;
      for (Space& space : memory_.spaces()) {
        const BufferView& lead = buffers[space.lead()];
        const bool in_elements = link_ == nullptr || aligned(lead);
        results.push_back(in_elements ? for_link(space, lead) : scratch(space, bytes_of(like)));
        reduce(space, stages, buffers, hosts, {results.back(), like.count, like.dtype});
      }
      if (link_ != nullptr) link_->all_reduce(results, like.count, like.dtype, stages.between);
      for (std::size_t s = 0; s < results.size(); ++s) {
        finish(memory_.spaces()[s], stages, results[s], {results[s], like.count, like.dtype});
      }
      spread(results, buffers);
      host_.take_out(results.front(), bytes_of(like), 0, bytes_of(like));
    });
    finish_on_host();
    host_.give_all(like, buffers);
  }

  void reduce_scatter(std::span<const BufferView> inputs, std::span<const BufferView> outputs, ReduceOp op) override {
    const auto lock = begin("reduce_scatter");
    const BufferView& whole = inputs.front();
    const Stages stages(op, whole.dtype, link_ != nullptr);
    const std::size_t part = bytes_of(outputs.front());
    memory_.enter(inputs);
    memory_.enter(outputs);
    run({inputs, outputs}, [&] {
      const HostPart hosts = host_.bring_in(inputs, op);
      std::vector<void*> results;
      for (Space& space : memory_.spaces()) {
        results.push_back(scratch(space, bytes_of(whole)));
        reduce(space, stages, inputs, hosts, {results.back(), whole.count, whole.dtype});
      }
      const std::vector<Piece> pieces = parts_of(results, part);
      if (link_ != nullptr) link_->reduce(pieces, outputs.front().count, whole.dtype, stages.between);
      for (std::size_t d = 0; d < pieces.size(); ++d) {
        void* const from = pieces[d].at[pieces[d].root];
        BufferView result = outputs[d];
        if (memory_.on_host(d)) result.data = from;
        finish(memory_.spaces()[pieces[d].root], stages, from, result);
        if (memory_.on_host(d)) host_.take_out(from, part, d * part, bytes_of(whole));
      }
    });
    finish_on_host();
    for (const std::size_t d : memory_.host_devices()) host_.give(whole, d * outputs[d].count, outputs[d]);
  }

  void all_gather(std::span<const BufferView> inputs, std::span<const BufferView> outputs) override {
    const auto lock = begin("all_gather");
    const BufferView& whole = outputs.front();
    const std::size_t part = bytes_of(inputs.front());
    memory_.enter(inputs);
    memory_.enter(outputs);
    run({inputs, outputs}, [&] {
      std::vector<void*> gathered;
      for (Space& space : memory_.spaces()) gathered.push_back(for_link(space, outputs[space.lead()]));
      const std::vector<Piece> pieces = parts_of(gathered, part);
      for (std::size_t d = 0; d < pieces.size(); ++d) {
        const void* const from =
            memory_.on_host(d) ? host_.stage(inputs[d], d * part, bytes_of(whole)) : inputs[d].data;
        copy(memory_.spaces()[pieces[d].root], pieces[d].at[pieces[d].root], from, part);
      }
      if (link_ != nullptr) link_->broadcast(pieces, part);
      spread(gathered, outputs);
      host_.take_out(gathered.front(), bytes_of(whole), 0, bytes_of(whole));
    });
    finish_on_host();
    host_.give_all(whole, outputs);
  }

  void broadcast(std::span<const BufferView> buffers, std::size_t root) override {
    const auto lock = begin("broadcast");
    const BufferView& like = buffers[root];
    memory_.enter(buffers);
    run({buffers}, [&] {
      Piece piece{.root = endpoint_of(root)};
      for (std::size_t s = 0; s < memory_.spaces().size(); ++s) {
        const bool has_it = s == piece.root && !memory_.on_host(root);
        Space& space = memory_.spaces()[s];
        piece.at.push_back(for_link(space, has_it ? like : buffers[space.lead()]));
      }
      copy(memory_.spaces()[piece.root], piece.at[piece.root],
           memory_.on_host(root) ? host_.stage(like, 0, bytes_of(like)) : like.data, bytes_of(like));
      if (link_ != nullptr) link_->broadcast({&piece, 1}, bytes_of(like));
      spread(piece.at, buffers);
      host_.take_out(piece.at.front(), bytes_of(like), 0, bytes_of(like));
    });
    finish_on_host();
    host_.give_all(like, buffers, root);
  }

  void send(const BufferView& input, const BufferView& output, std::size_t source, std::size_t target) override {
    const auto lock = begin("send");
    const bool from_host = memory_.on_host(source);
    const bool to_host = memory_.on_host(target);
    if (from_host && to_host) return copy_on_host(group_, input, {&output, 1});
    Space& space = memory_.space_of(to_host ? source : target);
    memory_.enter(source, input, space);
    memory_.enter(target, output, space);
    if (to_host) {
      host_.take_out(space, input);
    } else {
      copy(space, output.data, from_host ? host_.stage(input, 0, bytes_of(input)) : input.data, bytes_of(input));
    }
    memory_.leave(source, input, space);
    memory_.leave(target, output, space);
    if (from_host || to_host) await_devices();
    if (to_host) host_.give(input, 0, output);
  }

  void wait() override {
    const auto lock = begin("wait");
    await_devices();
  }

  void close() override {
    const std::lock_guard lock(mutex_);
    if (std::exchange(closed_, true)) return;
    const std::unique_ptr<Link> link = std::move(link_);
    try {
      if (link != nullptr) link->close();
    } catch (const Error&) {
      memory_.close(options_.timeout);
      throw;
    } catch (...) {  // interrupted: do not wait again
      memory_.leak();
      throw;
    }
    memory_.close(options_.timeout);
  }

  [[nodiscard]] std::string description() const override { return description_; }

 private:
  static void copy(const Space& space, void* to, const void* from, std::size_t bytes) {
    if (to != from) space.endpoint.stream->copy(to, from, bytes);
  }

  static void* scratch(Space& space, std::size_t bytes) { return MemorySpaces::reserve(space, space.scratch, bytes); }

  /// The buffer itself, if the link may use it in place. Otherwise memory of the space, of the same size.
  void* for_link(Space& space, const BufferView& buffer) {
    const bool in_place = link_ == nullptr || !link_->accesses_peers() || space.endpoint.opened->shares(buffer.data);
    return in_place ? buffer.data : scratch(space, bytes_of(buffer));
  }

  [[nodiscard]] std::unique_lock<std::mutex> begin(const char* call) {
    if (getpid() != owner_) {
      throw Unavailable(
          fmt::format("{}: this communicator belongs to process {}, and its devices do not survive "
                      "fork(). Start workers with the 'spawn' method.",
                      call, owner_));
    }
    std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock.owns_lock()) {
      throw InvalidArgument(
          fmt::format("{}: another thread is in a call of this communicator; one at a time, in one order", call));
    }
    if (closed_) throw Unavailable(fmt::format("{}: the communicator is closed. Make a new one.", call));
    if (link_ != nullptr) link_->check();
    return lock;
  }

  /// Runs `body`. The owners of the buffers go on after the enqueued work, also if `body` throws.
  template <class Body>
  void run(std::initializer_list<std::span<const BufferView>> arguments, Body body) {
    const auto leave = [&] {
      for (const auto& buffers : arguments) memory_.leave(buffers);
    };
    try {
      body();
    } catch (...) {
      leave();
      throw;
    }
    leave();
  }

  /// result = the first stage over a space's data. Home's data includes the host devices'.
  void reduce(const Space& space, const Stages& stages, std::span<const BufferView> inputs, const HostPart& hosts,
              const BufferView& result) {
    std::vector<const void*> sources;
    for (const std::size_t d : space.members) sources.push_back(inputs[d].data);
    if (&space == &memory_.home() && hosts.data != nullptr) sources.insert(sources.end(), hosts.times, hosts.data);
    if (sources.size() == 1 && stages.first != ReduceOp::mean) {
      return copy(space, result.data, sources.front(), bytes_of(result));
    }
    space.endpoint.stream->reduce({sources, result.data, result.count, result.dtype, 1.0, stages.first, group_.size()});
  }

  /// result = the last stage over what the second stage left at `from`. Both may be the same memory.
  void finish(const Space& space, const Stages& stages, const void* from, const BufferView& result) {
    if (stages.last == stages.first) return copy(space, result.data, from, bytes_of(result));
    space.endpoint.stream->reduce(
        {{&from, 1}, result.data, result.count, result.dtype, 1.0, stages.last, group_.size()});
  }

  /// The index of the space where a device's data is. Host devices are at home.
  [[nodiscard]] std::size_t endpoint_of(std::size_t device) const {
    return memory_.on_host(device) ? 0 : memory_.index_of_space(device);
  }

  /// The part of each device in whole buffers, of which there is one in each space.
  [[nodiscard]] std::vector<Piece> parts_of(const std::vector<void*>& wholes, std::size_t part_bytes) const {
    std::vector<Piece> parts(group_.size());
    for (std::size_t d = 0; d < parts.size(); ++d) {
      parts[d].root = endpoint_of(d);
      for (void* const whole : wholes) parts[d].at.push_back(static_cast<char*>(whole) + d * part_bytes);
    }
    return parts;
  }

  /// Copies what each space has, one buffer of it, to all of its devices.
  void spread(const std::vector<void*>& from, std::span<const BufferView> buffers) {
    for (std::size_t s = 0; s < from.size(); ++s) {
      const Space& space = memory_.spaces()[s];
      for (const std::size_t d : space.members) copy(space, buffers[d].data, from[s], bytes_of(buffers[d]));
    }
  }

  void finish_on_host() {
    if (!host_.empty()) await_devices();
  }

  /// Waits twice the timeout: once for the work before the collectives, once for the collectives. NCCL's link has its
  /// own deadline for those.
  void await_devices() {
    try {
      memory_.wait(2 * internal::bounded(options_.timeout));
    } catch (const Timeout&) {
      if (link_ == nullptr) throw;
      link_->give_up();
      link_->check();  // throws instead if the link knows the cause
      throw;
    }
    if (link_ != nullptr) link_->check();  // the result of an aborted collective is not defined
  }

  std::mutex mutex_;
  DeviceGroup group_;
  CommunicatorOptions options_;
  pid_t owner_;
  bool closed_ = false;
  MemorySpaces memory_;
  HostSide host_;
  std::unique_ptr<Link> link_;
  std::string description_;
};

}  // namespace

std::unique_ptr<Collectives> make_async_collectives(const DeviceGroup& group, const CommunicatorOptions& options) {
  return std::make_unique<AsyncCollectives>(group, options);
}

}  // namespace paceline::internal
