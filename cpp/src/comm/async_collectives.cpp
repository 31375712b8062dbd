// SPDX-License-Identifier: Apache-2.0
//
// Collectives of devices that work after the call. Each memory space has one stream, and all its work is enqueued there
// in program order, so NCCL sees the same order on every GPU. The link moves data between spaces; the code here works
// inside one space. The order of the work:
//
//   1. A buffer is first used after the work that its owner's stream has: enter() makes the space's stream wait.
//   2. What the owner enqueues next runs after the last use of the buffer: leave() makes the owner's stream wait for
//      its space.
//   3. The host reads a result, or uses pinned memory again, after the devices' work: the caller waits.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <paceline/error.hpp>

#include "comm/block_layout.hpp"
#include "comm/collectives.hpp"
#include "comm/host_side.hpp"
#include "comm/link.hpp"
#include "comm/memory_spaces.hpp"
#include "comm/staged_op.hpp"
#include "runtime/deadline.hpp"

namespace paceline::internal {
namespace {

std::size_t bytes_of(const BufferView& view) { return view.count * size_of(view.dtype); }

/// NCCL loads whole elements.
bool aligned(const BufferView& view) { return reinterpret_cast<std::uintptr_t>(view.data) % size_of(view.dtype) == 0; }

/// Each space holds the parts of its own devices; home also holds those of the host devices.
BlockLayout layout_of(MemorySpaces& memory, std::size_t device_count) {
  std::vector<std::vector<std::size_t>> owned;
  for (const Space& space : memory.spaces()) owned.push_back(space.members);
  owned.front().insert(owned.front().end(), memory.host_devices().begin(), memory.host_devices().end());
  std::sort(owned.front().begin(), owned.front().end());
  return {std::move(owned), device_count};
}

class AsyncCollectives final : public Collectives {
 public:
  AsyncCollectives(DeviceGroup group, const CommunicatorOptions& options)
      : group_(std::move(group)),
        options_(options),
        owner_(getpid()),
        memory_(group_),
        host_(group_, memory_),
        layout_(layout_of(memory_, group_.size())) {
    description_ = fmt::format("the memory of {}", memory_.home().endpoint.device.memory_space);
    if (memory_.spaces().size() == 1) return;
    link_ = make_link(memory_.endpoints(), options);
    description_ = link_->description();
  }

  ~AsyncCollectives() override {
    if (getpid() != owner_) {  // CUDA does not survive fork(), so a child must not touch it
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
    const StagedOp stages = staged(like.dtype, op);
    memory_.enter(buffers);
    run({buffers}, [&] {
      const HostPart hosts = host_.bring_in(buffers, op);
      std::vector<void*> results;
      for (Space& space : memory_.spaces()) {
        const BufferView& lead = buffers[space.lead()];
        const bool in_place = link_ == nullptr || aligned(lead);
        results.push_back(in_place ? lead.data : MemorySpaces::reserve(space, space.scratch, bytes_of(like)));
        reduce(space, stages, buffers, hosts, {results.back(), like.count, like.dtype});
      }
      if (link_ != nullptr) link_->all_reduce(results, like.count, like.dtype, stages.between());
      for (std::size_t s = 0; s < results.size(); ++s) {
        const Space& space = memory_.spaces()[s];
        stages.last(*space.endpoint.stream, results[s], {results[s], like.count, like.dtype});
        for (const DeviceId d : space.members) copy(space, buffers[d].data, results[s], bytes_of(like));
      }
      host_.take_out(results.front(), bytes_of(like), 0, bytes_of(like));
    });
    finish_on_host();
    host_.give_all(like, buffers);
  }

  void reduce_scatter(std::span<const BufferView> inputs, std::span<const BufferView> outputs, ReduceOp op) override {
    const auto lock = begin("reduce_scatter");
    const StagedOp stages = staged(inputs.front().dtype, op);
    memory_.enter(inputs);
    memory_.enter(outputs);
    run({inputs, outputs}, [&] {
      const HostPart hosts = host_.bring_in(inputs, op);
      if (link_ == nullptr) {
        scatter_inside(inputs, outputs, hosts, stages);
      } else {
        scatter_across(inputs, outputs, hosts, stages);
      }
    });
    finish_on_host();
    for (const DeviceId d : memory_.host_devices()) {
      host_.give(inputs.front(), d * outputs[d].count, outputs[d]);
    }
  }

  void all_gather(std::span<const BufferView> inputs, std::span<const BufferView> outputs) override {
    const auto lock = begin("all_gather");
    const BufferView& whole = outputs.front();
    const std::size_t part = bytes_of(inputs.front());
    std::vector<const void*> sources;
    for (std::size_t d = 0; d < inputs.size(); ++d) {
      sources.push_back(memory_.on_host(d) ? host_.stage(inputs[d], d * part, bytes_of(whole)) : inputs[d].data);
    }
    memory_.enter(inputs);
    memory_.enter(outputs);
    run({inputs, outputs}, [&] {
      std::vector<void*> gathered;
      for (std::size_t s = 0; s < memory_.spaces().size(); ++s) {
        Space& space = memory_.spaces()[s];
        gathered.push_back(layout_.natural() ? outputs[space.lead()].data
                                             : MemorySpaces::reserve(space, space.scratch, layout_.total() * part));
        for (const DeviceId d : layout_.owned(s)) copy(space, slot(gathered[s], d, part), sources[d], part);
      }
      if (link_ != nullptr) link_->all_gather(gathered, layout_.block() * part);
      for (std::size_t s = 0; s < gathered.size(); ++s) {
        const Space& space = memory_.spaces()[s];
        for (const std::size_t m : space.members) {
          char* const to = static_cast<char*>(outputs[m].data);
          if (layout_.natural()) {
            copy(space, to, gathered[s], bytes_of(whole));
          } else {
            for (std::size_t d = 0; d < inputs.size(); ++d)
              copy(space, to + d * part, slot(gathered[s], d, part), part);
          }
        }
      }
      host_.take_out(outputs[memory_.home().lead()].data, bytes_of(whole), 0, bytes_of(whole));
    });
    finish_on_host();
    host_.give_all(whole, outputs);
  }

  void broadcast(std::span<const BufferView> buffers, std::size_t root) override {
    const auto lock = begin("broadcast");
    const BufferView& like = buffers[root];
    const bool from_host = memory_.on_host(root);
    Space& from = from_host ? memory_.home() : memory_.space_of(root);
    const std::size_t source = from_host ? from.lead() : root;
    memory_.enter(buffers);
    run({buffers}, [&] {
      if (from_host) copy(from, buffers[source].data, host_.stage(like, 0, bytes_of(like)), bytes_of(like));
      std::vector<void*> first;  // the first buffer of each space
      std::size_t root_endpoint = 0;
      for (Space& space : memory_.spaces()) {
        if (&space == &from) root_endpoint = first.size();
        first.push_back(buffers[&space == &from ? source : space.lead()].data);
      }
      if (link_ != nullptr) link_->broadcast(first, bytes_of(like), root_endpoint);
      for (std::size_t s = 0; s < first.size(); ++s) {
        Space& space = memory_.spaces()[s];
        for (const DeviceId d : space.members) copy(space, buffers[d].data, first[s], bytes_of(like));
      }
      host_.take_out(buffers[memory_.home().lead()].data, bytes_of(like), 0, bytes_of(like));
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

  [[nodiscard]] std::unique_lock<std::mutex> begin(const char* call) {
    if (getpid() != owner_) {
      throw Unavailable(
          fmt::format("{}: this communicator belongs to process {}, and CUDA does not survive fork(). "
                      "Start workers with the 'spawn' method.",
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
    try {
      body();
    } catch (...) {
      // Other endpoints may still read: the error may have come in the middle of a collective.
      for (const auto& buffers : arguments) memory_.leave(buffers, MemorySpaces::Until::every_space);
      throw;
    }
    for (const auto& buffers : arguments) memory_.leave(buffers, MemorySpaces::Until::own_space);
  }

  [[nodiscard]] StagedOp staged(DType dtype, ReduceOp op) const { return {op, dtype, group_.size(), link_ != nullptr}; }

  /// result = the first stage over a space's data, from element `begin` on. Home's data includes the host devices'.
  void reduce(const Space& space, const StagedOp& op, std::span<const BufferView> inputs, const HostPart& hosts,
              const BufferView& result, std::size_t begin = 0) {
    const std::size_t offset = begin * size_of(result.dtype);
    std::vector<const void*> sources;
    for (const DeviceId d : space.members) sources.push_back(static_cast<const char*>(inputs[d].data) + offset);
    if (&space == &memory_.home() && hosts.data != nullptr) {
      sources.insert(sources.end(), hosts.times, static_cast<const char*>(hosts.data) + offset);
    }
    op.first(*space.endpoint.stream, sources, result);
  }

  [[nodiscard]] char* slot(void* base, DeviceId device, std::size_t part_bytes) const {
    return static_cast<char*>(base) + layout_.slot(device) * part_bytes;
  }

  void scatter_inside(std::span<const BufferView> inputs, std::span<const BufferView> outputs, const HostPart& hosts,
                      const StagedOp& op) {
    Space& home = memory_.home();
    const std::size_t part = bytes_of(outputs.front());
    for (std::size_t d = 0; d < outputs.size(); ++d) {
      BufferView result = outputs[d];
      if (memory_.on_host(d)) result.data = MemorySpaces::reserve(home, home.scratch, part);
      reduce(home, op, inputs, hosts, result, d * result.count);
      if (memory_.on_host(d)) host_.take_out(result.data, part, d * part, bytes_of(inputs.front()));
    }
  }

  void scatter_across(std::span<const BufferView> inputs, std::span<const BufferView> outputs, const HostPart& hosts,
                      const StagedOp& op) {
    const BufferView& like = outputs.front();
    const std::size_t part = bytes_of(like);
    // One GPU per space, and nothing to do before its data crosses.
    const bool direct = layout_.natural() && layout_.block() == 1 && op.skips_first() &&
                        std::all_of(inputs.begin(), inputs.end(), aligned) &&
                        std::all_of(outputs.begin(), outputs.end(), aligned);
    const std::size_t runs = layout_.natural() ? 1 : outputs.size();
    const std::size_t length = inputs.front().count / runs;
    std::vector<const void*> wholes;
    std::vector<void*> parts;
    for (std::size_t s = 0; s < memory_.spaces().size(); ++s) {
      Space& space = memory_.spaces()[s];
      if (direct) {
        wholes.push_back(inputs[s].data);
        parts.push_back(outputs[s].data);
        continue;
      }
      void* const whole = MemorySpaces::reserve(space, space.scratch, layout_.total() * part);
      for (std::size_t i = 0; i < runs; ++i) {
        reduce(space, op, inputs, hosts, {slot(whole, i, part), length, like.dtype}, i * length);
      }
      wholes.push_back(whole);
      parts.push_back(static_cast<char*>(whole) + s * layout_.block() * part);
    }
    link_->reduce_scatter(wholes, parts, layout_.block() * like.count, like.dtype, op.between());
    for (std::size_t s = 0; s < parts.size(); ++s) {
      char* from = static_cast<char*>(parts[s]);
      for (const DeviceId d : layout_.owned(s)) {
        BufferView result = outputs[d];
        if (memory_.on_host(d)) result.data = from;
        op.last(*memory_.spaces()[s].endpoint.stream, from, result);
        if (memory_.on_host(d)) host_.take_out(result.data, part, d * part, bytes_of(inputs.front()));
        from += part;
      }
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
  BlockLayout layout_;
  std::unique_ptr<Link> link_;
  std::string description_;
};

}  // namespace

std::unique_ptr<Collectives> make_async_collectives(const DeviceGroup& group, const CommunicatorOptions& options) {
  return std::make_unique<AsyncCollectives>(group, options);
}

}  // namespace paceline::internal
