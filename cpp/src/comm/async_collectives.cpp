// SPDX-License-Identifier: Apache-2.0
//
// Collectives of devices that work after the call. Each memory space has one stream, on which everything for it is
// enqueued: in program order, so NCCL sees the same order on every GPU. What must come after what:
//
//   1. The first use of a buffer after what its owner's stream was given: enter() makes the space's stream wait.
//   2. What the owner enqueues next after the last use of the buffer: leave() makes the owner's stream wait for its
//      space; for all of them where other spaces read the buffer directly (all_gather).
//   3. A direct copy from another space's buffer after that one's owner: meet().
//   4. The host's reading of a result, and its next use of pinned memory, after the devices' work: the caller waits.
#include <fmt/format.h>
#include <unistd.h>

#include <cstring>
#include <initializer_list>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <paceline/error.hpp>

#include "comm/clique.hpp"
#include "comm/collectives.hpp"
#include "comm/memory_spaces.hpp"

namespace paceline::internal {
namespace {

using Until = MemorySpaces::Until;

char* at(const BufferView& view, std::size_t element) {
  return static_cast<char*>(view.data) + element * size_of(view.dtype);
}

void check_reducible(const char* call, DType dtype, ReduceOp op) {
  if (op != ReduceOp::sum && op != ReduceOp::mean) {
    throw Unavailable(
        fmt::format("{}: '{}' is not there for groups with GPUs, only sum and mean; make a group of host "
                    "devices, or compute it from what all_gather brings together",
                    call, name_of(op)));
  }
  if (dtype == DType::int32 || dtype == DType::int64) {
    throw Unavailable(
        fmt::format("{}: elements of type {} are not reduced on GPUs, only floating-point ones; convert "
                    "them (float64 holds every integer up to 2^53)",
                    call, name_of(dtype)));
  }
}

class AsyncCollectives final : public Collectives {
 public:
  AsyncCollectives(DeviceGroup group, const CommunicatorOptions& options)
      : group_(std::move(group)), options_(options), owner_(getpid()), memory_(group_) {
    description_ = fmt::format("the memory of {}", memory_.home().rank.device.memory_space);
    if (memory_.spaces().size() == 1) return;
    clique_ = make_clique(memory_.ranks(), options);
    description_ = clique_->description();
  }

  ~AsyncCollectives() override {
    if (getpid() != owner_) {  // CUDA does not survive fork(): nothing of it may be touched here
      static_cast<void>(clique_.release());
      memory_.leak();
      return;
    }
    try {
      close();
    } catch (const Error&) {  // left behind, as close() says; a destructor has nobody to tell
    }
  }

  void all_reduce(std::span<const BufferView> buffers, ReduceOp op) override {
    const auto lock = begin("all_reduce");
    const BufferView& like = buffers.front();
    check_reducible("all_reduce", like.dtype, op);
    memory_.enter(buffers);
    run({buffers}, Until::own_space, [&] {
      std::vector<void*> sums;
      for (Space& space : memory_.spaces()) sums.push_back(buffers[space.lead()].data);
      reduce(buffers, sums, op);
      for (Space& space : memory_.spaces()) {
        void* const sum = buffers[space.lead()].data;
        for (const std::size_t d : space.members) copy(space, buffers[d].data, sum, bytes_of(like));
      }
      take_out(sums.front(), bytes_of(like));
    });
    give_host(buffers, like);
  }

  void reduce_scatter(std::span<const BufferView> inputs, std::span<const BufferView> outputs, ReduceOp op) override {
    const auto lock = begin("reduce_scatter");
    const BufferView& whole = inputs.front();
    const std::size_t part = outputs.front().count;
    check_reducible("reduce_scatter", whole.dtype, op);
    memory_.enter(inputs);
    memory_.enter(outputs);
    run({inputs, outputs}, Until::own_space, [&] {
      std::vector<void*> sums;
      for (Space& space : memory_.spaces()) {
        sums.push_back(MemorySpaces::reserve(space, space.scratch, bytes_of(whole)));
      }
      reduce(inputs, sums, op);
      for (std::size_t s = 0; s < sums.size(); ++s) {
        Space& space = memory_.spaces()[s];
        for (const std::size_t d : space.members) {
          const std::size_t offset = d * part * size_of(whole.dtype);
          copy(space, outputs[d].data, static_cast<char*>(sums[s]) + offset, bytes_of(outputs[d]));
        }
      }
      take_out(sums.front(), bytes_of(whole));
    });
    finish_on_host();
    for (const std::size_t d : memory_.host_devices()) {
      const BufferView mine{at(result(whole), d * part), part, whole.dtype};
      copy_on_host(group_, mine, outputs.subspan(d, 1));
    }
  }

  void all_gather(std::span<const BufferView> inputs, std::span<const BufferView> outputs) override {
    const auto lock = begin("all_gather");
    const BufferView& whole = outputs.front();
    const std::size_t part = inputs.front().count;
    std::vector<const void*> sources;
    for (const BufferView& input : inputs) sources.push_back(input.data);
    for (const std::size_t d : memory_.host_devices()) {
      const BufferView staged{memory_.staging(kIn, bytes_of(whole)), whole.count, whole.dtype};
      sources[d] = std::memcpy(at(staged, d * part), inputs[d].data, bytes_of(inputs[d]));
    }
    memory_.enter(inputs);
    memory_.enter(outputs);
    run({inputs, outputs}, Until::every_space, [&] {
      memory_.meet();
      for (Space& space : memory_.spaces()) {
        for (std::size_t d = 0; d < sources.size(); ++d) {
          // Once into the space, and from there to its other devices. An input may lie in its place already.
          const void* from = sources[d];
          for (const std::size_t m : space.members) {
            void* const to = at(outputs[m], d * part);
            if (to != inputs[d].data) copy(space, to, from, bytes_of(inputs[d]));
            from = to;
          }
        }
      }
      take_out(outputs[memory_.home().lead()].data, bytes_of(whole));
    });
    give_host(outputs, whole);
  }

  void broadcast(std::span<const BufferView> buffers, std::size_t root) override {
    const auto lock = begin("broadcast");
    const BufferView& like = buffers[root];
    const bool from_host = memory_.on_host(root);
    Space& from = from_host ? memory_.home() : memory_.space_of(root);
    const std::size_t source = from_host ? from.lead() : root;
    memory_.enter(buffers);
    run({buffers}, Until::own_space, [&] {
      if (from_host) {
        void* const staged = std::memcpy(memory_.staging(kIn, bytes_of(like)), like.data, bytes_of(like));
        copy(from, buffers[source].data, staged, bytes_of(like));
      }
      std::vector<void*> first;  // of each space
      std::size_t root_rank = 0;
      for (Space& space : memory_.spaces()) {
        if (&space == &from) root_rank = first.size();
        first.push_back(buffers[&space == &from ? source : space.lead()].data);
      }
      if (clique_ != nullptr) clique_->broadcast(first, bytes_of(like), root_rank);
      for (std::size_t s = 0; s < first.size(); ++s) {
        Space& space = memory_.spaces()[s];
        for (const std::size_t d : space.members) copy(space, buffers[d].data, first[s], bytes_of(like));
      }
      take_out(buffers[memory_.home().lead()].data, bytes_of(like));
    });
    give_host(buffers, like, root);
  }

  void wait() override {
    const auto lock = begin("wait");
    memory_.wait();
    if (clique_ != nullptr) clique_->check();
  }

  void close() override {
    const std::lock_guard lock(mutex_);
    if (std::exchange(closed_, true)) return;
    const std::unique_ptr<Clique> clique = std::move(clique_);
    try {
      if (clique != nullptr) clique->close();
    } catch (...) {
      memory_.close(options_.timeout);
      throw;
    }
    memory_.close(options_.timeout);
  }

  [[nodiscard]] std::string description() const override { return description_; }

 private:
  // Which pinned memory: what goes to the devices, what comes from them.
  static constexpr std::size_t kIn = 0;
  static constexpr std::size_t kOut = 1;

  [[nodiscard]] static std::size_t bytes_of(const BufferView& view) { return view.count * size_of(view.dtype); }

  static void copy(const Space& space, void* to, const void* from, std::size_t bytes) {
    if (to != from) space.rank.stream->copy(to, from, bytes);
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
    if (clique_ != nullptr) clique_->check();
    return lock;
  }

  /// Whatever happens: the owners of the buffers may only go on after what was enqueued for them.
  template <class Body>
  void run(std::initializer_list<std::span<const BufferView>> arguments, Until until, Body body) {
    try {
      body();
    } catch (...) {
      for (const auto& buffers : arguments) memory_.leave(buffers, Until::every_space);
      throw;
    }
    for (const auto& buffers : arguments) memory_.leave(buffers, until);
  }

  /// sums[s] of every space = op over all inputs. They may be inputs of their own space.
  void reduce(std::span<const BufferView> inputs, const std::vector<void*>& sums, ReduceOp op) {
    const BufferView& like = inputs.front();
    const double scale = op == ReduceOp::mean ? 1.0 / static_cast<double>(inputs.size()) : 1.0;
    for (std::size_t s = 0; s < sums.size(); ++s) {
      const Space& space = memory_.spaces()[s];
      std::vector<const void*> members;
      for (const std::size_t d : space.members) members.push_back(inputs[d].data);
      if (members.size() == 1 && members.front() == sums[s] && scale == 1.0) continue;
      space.rank.stream->sum({members, sums[s], like.count, like.dtype, scale});
    }
    if (!memory_.host_devices().empty()) bring_in(inputs, sums.front(), scale);
    if (clique_ != nullptr) clique_->all_reduce(sums, like.count, like.dtype);
  }

  /// sum += scale * what the host's devices have; at home.
  void bring_in(std::span<const BufferView> inputs, void* sum, double scale) {
    const BufferView& like = inputs.front();
    std::vector<BufferView> views;
    for (const std::size_t d : memory_.host_devices()) views.push_back(inputs[d]);
    const BufferView staged{memory_.staging(kIn, bytes_of(like)), like.count, like.dtype};
    reduce_on_host(group_, views, staged, ReduceOp::sum);
    Space& home = memory_.home();
    void* const landed = MemorySpaces::reserve(home, home.landing, bytes_of(like));
    copy(home, landed, staged.data, bytes_of(like));
    const void* const alone[] = {landed};
    if (scale != 1.0) home.rank.stream->sum({alone, landed, like.count, like.dtype, scale});
    const void* const both[] = {sum, landed};
    home.rank.stream->sum({both, sum, like.count, like.dtype, 1.0});
  }

  /// What home has, on its way to the host.
  void take_out(const void* from, std::size_t bytes) {
    if (!memory_.host_devices().empty()) copy(memory_.home(), memory_.staging(kOut, bytes), from, bytes);
  }

  /// Where take_out() has put it.
  [[nodiscard]] BufferView result(const BufferView& like) {
    return {memory_.staging(kOut, bytes_of(like)), like.count, like.dtype};
  }

  void finish_on_host() {
    if (memory_.host_devices().empty()) return;
    memory_.wait();
    if (clique_ != nullptr) clique_->check();  // what an aborted collective has left is not for the host's buffers
  }

  static constexpr std::size_t kNobody = static_cast<std::size_t>(-1);

  /// The result to every host device but one.
  void give_host(std::span<const BufferView> buffers, const BufferView& like, std::size_t except = kNobody) {
    if (memory_.host_devices().empty()) return;
    finish_on_host();
    std::vector<BufferView> targets;
    for (const std::size_t d : memory_.host_devices()) {
      if (d != except) targets.push_back(buffers[d]);
    }
    copy_on_host(group_, result(like), targets);
  }

  std::mutex mutex_;
  DeviceGroup group_;
  CommunicatorOptions options_;
  pid_t owner_;
  bool closed_ = false;
  MemorySpaces memory_;
  std::unique_ptr<Clique> clique_;
  std::string description_;
};

}  // namespace

std::unique_ptr<Collectives> make_async_collectives(const DeviceGroup& group, const CommunicatorOptions& options) {
  return std::make_unique<AsyncCollectives>(group, options);
}

}  // namespace paceline::internal
