// SPDX-License-Identifier: Apache-2.0
#include "fake_nccl.hpp"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <utility>

namespace paceline::nccl {

/// One rank. Communicators of one id belong together.
struct Communicator {
  int rank = 0;
  int count = 0;
  int device = 0;
  int id = 0;
  std::thread::id thread;
  Result error = kSuccess;
};

}  // namespace paceline::nccl

namespace fake {
namespace {

using namespace paceline::nccl;

std::size_t size_of(DataType type) {
  switch (type) {
    case kInt8:
      return 1;
    case kFloat16:
    case kBfloat16:
      return 2;
    case kInt32:
    case kFloat32:
      return 4;
    default:
      return 8;
  }
}

struct Call {
  const char* function;
  const void* send;
  void* receive;
  std::size_t count;
  DataType type;
  int root;  // -1: all give
  Comm comm;
  cudaStream_t stream;
  ReductionOperation op = kSum;
  enum class Kind { whole, scatter, gather } kind = Kind::whole;  // what a rank gives and gets beside `count` elements
};

/// One collective over all its ranks. What the streams do to it happens under the fake CUDA's lock.
struct Collective {
  std::vector<Call> calls;  // by rank
  std::vector<std::vector<std::byte>> given;
  std::vector<Signal> arrived;
  Signal end;  // of a hang
  std::atomic<bool> aborted{false};
};

struct Fault {
  std::string function;
  int rank;
  Result result = kSuccess;
  std::chrono::milliseconds delay{0};
  bool held = false;
};

class Fake final : public Nccl {
 public:
  void reset(const NcclHost& host) override {
    const std::lock_guard lock(mutex_);
    host_ = host;
    version_ = 23007;
    faults_.clear();
    comms_.clear();
    under_way_.clear();
    problems_.clear();
    hang_ = released_ = false;
    group_error_ = kSuccess;
    made_ = aborted_ = inside_ = depth_ = 0;
    inits_.clear();
    calls_.clear();
  }
  void set_version(int version) override {
    const std::lock_guard lock(mutex_);
    version_ = version;
  }
  void fail(const std::string& function, int rank, Result result) override { add({function, rank, result}); }
  void delay(const std::string& function, int rank, std::chrono::milliseconds time) override {
    add({function, rank, kSuccess, time});
  }
  void hold(const std::string& function, int rank) override {
    add({function, rank, kSuccess, std::chrono::milliseconds(0), true});
  }
  void release() override {
    const std::lock_guard lock(mutex_);
    released_ = true;
    changed_.notify_all();
  }
  void hang() override {
    const std::lock_guard lock(mutex_);
    hang_ = true;
  }
  void break_rank(int rank, Result result) override {
    const std::lock_guard lock(mutex_);
    for (const auto& comm : comms_) {
      if (comm->rank == rank) comm->error = result;
    }
  }
  int communicators() const override { return of(&Fake::comms_size); }
  int made() const override {
    return of([](const Fake& f) { return f.made_; });
  }
  int aborted() const override {
    return of([](const Fake& f) { return f.aborted_; });
  }
  int inside() const override {
    return of([](const Fake& f) { return f.inside_; });
  }
  std::vector<std::string> problems() const override {
    const std::lock_guard lock(mutex_);
    return problems_;
  }

  // What follows are NCCL's entry points.

  Result get_version(int* version) {
    const std::lock_guard lock(mutex_);
    *version = version_;
    return kSuccess;
  }

  Result get_unique_id(UniqueId* id) {
    return call("ncclGetUniqueId", nullptr, [&] {
      std::memset(id->internal, 0, sizeof(id->internal));
      ++ids_;
      std::memcpy(id->internal, &ids_, sizeof(ids_));
      return kSuccess;
    });
  }

  Result init(Comm* comm, int count, const UniqueId& id, int rank, const Config* config) {
    auto made = std::make_unique<Communicator>();
    made->rank = rank;
    made->count = count;
    made->thread = std::this_thread::get_id();
    std::memcpy(&made->id, id.internal, sizeof(made->id));
    return call("ncclCommInitRankConfig", made.get(), [&] {
      made->device = host_.current_device();
      if (config->magic != 0xcafebeef || config->size != sizeof(Config)) return kInvalidArgument;
      if (config->blocking != 1) complain("a communicator that does not block was made");
      if (depth_ == 0) complain("a communicator was made outside of a group, and would wait for the others");
      for (const auto& other : comms_) {
        if (other->id == made->id && other->device == made->device) return kInvalidUsage;
      }
      inits_.push_back({made->id, count});
      *comm = made.get();
      comms_.push_back(std::move(made));
      ++made_;
      return kSuccess;
    });
  }

  Result end_of(Comm comm, const char* function) {
    const bool abort = std::string(function) == "ncclCommAbort";
    std::vector<std::shared_ptr<Collective>> ended;
    const Result result = call(function, comm, [&] {
      std::erase_if(under_way_, [&](const std::shared_ptr<Collective>& collective) {
        const bool mine = std::any_of(collective->calls.begin(), collective->calls.end(),
                                      [&](const Call& each) { return each.comm == comm; });
        if (mine && abort) ended.push_back(collective);
        return mine;
      });
      if (abort) ++aborted_;
      std::erase_if(comms_, [&](const auto& each) { return each.get() == comm; });
      return kSuccess;
    });
    for (const auto& collective : ended) {
      collective->aborted = true;
      for (const Signal& signal : collective->arrived) host_.give(signal);
      host_.give(collective->end);
    }
    return result;
  }

  Result async_error(Comm comm, Result* error) {
    return call("ncclCommGetAsyncError", comm, [&] {
      *error = comm->error;
      return kSuccess;
    });
  }

  Result group_start() {
    return call("ncclGroupStart", nullptr, [&] {
      ++depth_;
      return kSuccess;
    });
  }

  Result group_end() {
    return call("ncclGroupEnd", nullptr, [&] {
      if (--depth_ > 0) return kSuccess;
      if (group_error_ != kSuccess) {
        inits_.clear();
        calls_.clear();
        return std::exchange(group_error_, kSuccess);
      }
      const auto inits = std::exchange(inits_, {});
      for (const auto& [id, count] : inits) {
        const auto of_id = [&](const auto& comm) { return comm->id == id; };
        if (std::count_if(comms_.begin(), comms_.end(), of_id) != count) complain("a group lacks ranks: it would hang");
      }
      launch(std::exchange(calls_, {}));
      return kSuccess;
    });
  }

  Result collective(const Call& wanted) {
    return call(wanted.function, wanted.comm, [&] {
      if (depth_ == 0) complain(std::string(wanted.function) + " outside of a group: it would wait for the others");
      if (host_.device_of(wanted.stream) != wanted.comm->device) return kInvalidUsage;
      const auto address =
          reinterpret_cast<std::uintptr_t>(wanted.send) | reinterpret_cast<std::uintptr_t>(wanted.receive);
      if (address % size_of(wanted.type) != 0) complain("a buffer lies across the borders of its elements");
      calls_.push_back(wanted);
      return kSuccess;
    });
  }

 private:
  void add(Fault fault) {
    const std::lock_guard lock(mutex_);
    released_ = false;
    faults_.push_back(std::move(fault));
  }
  int comms_size() const { return static_cast<int>(comms_.size()); }
  template <class F>
  int of(F f) const {
    const std::lock_guard lock(mutex_);
    return std::invoke(f, *this);
  }
  void complain(std::string problem) { problems_.push_back(std::move(problem)); }

  /// The faults that were ordered, then the body, under the lock.
  template <class Body>
  Result call(const char* function, Comm comm, Body body) {
    std::unique_lock lock(mutex_);
    ++inside_;
    if (comm != nullptr && comm->thread != std::this_thread::get_id()) {
      complain(std::string(function) + " was called by a second thread");
    }
    const int rank = comm == nullptr ? kAnyRank : comm->rank;
    const auto fault = std::find_if(faults_.begin(), faults_.end(), [&](const Fault& f) {
      return f.function == function && (f.rank == kAnyRank || f.rank == rank);
    });
    Result result = kSuccess;
    if (fault != faults_.end()) {
      const Fault found = *fault;
      faults_.erase(fault);
      if (found.delay.count() > 0) {
        lock.unlock();
        std::this_thread::sleep_for(found.delay);
        lock.lock();
      }
      if (found.held) changed_.wait(lock, [&] { return released_; });
      result = found.result;
      if (result != kSuccess && std::string(function) == "ncclGroupEnd") {
        depth_ = 0;
        inits_.clear();
        calls_.clear();
      }
    }
    if (result == kSuccess) result = body();
    if (result != kSuccess && depth_ > 0) group_error_ = result;
    --inside_;
    return result;
  }

  void launch(std::vector<Call> calls) {
    while (!calls.empty()) {
      auto made = std::make_shared<Collective>();
      const int id = calls.front().comm->id;
      const auto count = static_cast<std::size_t>(calls.front().comm->count);
      // The next call of every rank of that clique, in rank order.
      for (std::size_t rank = 0; rank < count; ++rank) {
        const auto next = std::find_if(calls.begin(), calls.end(), [&](const Call& each) {
          return each.comm->id == id && each.comm->rank == static_cast<int>(rank);
        });
        if (next == calls.end()) return complain("a group lacks ranks: it would hang");
        made->calls.push_back(*next);
        calls.erase(next);
        const Call& first = made->calls.front();
        const Call& mine = made->calls.back();
        if (std::string(first.function) != mine.function || first.count != mine.count || first.type != mine.type ||
            first.root != mine.root || first.op != mine.op) {
          return complain("the ranks of a collective do not agree");
        }
      }
      made->given.resize(count);
      for (std::size_t rank = 0; rank < count; ++rank) made->arrived.push_back(host_.make_signal());
      made->end = host_.make_signal();
      if (!std::exchange(hang_, false)) host_.give(made->end);
      under_way_.push_back(made);
      for (std::size_t rank = 0; rank < count; ++rank) launch(made, rank);
    }
  }

  void launch(const std::shared_ptr<Collective>& made, std::size_t rank) {
    const Call& mine = made->calls[rank];
    const std::size_t bytes = mine.count * size_of(mine.type);
    const std::size_t ranks = made->calls.size();
    const std::size_t given_bytes = mine.kind == Call::Kind::scatter ? bytes * ranks : bytes;
    const std::size_t gotten_bytes = mine.kind == Call::Kind::gather ? bytes * ranks : bytes;
    const bool gives = mine.root < 0 || mine.root == static_cast<int>(rank);
    const NcclHost host = host_;
    host_.enqueue(
        mine.stream, mine.function,
        [host, made, rank, given_bytes, gives] {
          const Call& call = made->calls[rank];
          if (!gives || made->aborted) return;
          host.reads(call.send, given_bytes);
          const auto* const begin = static_cast<const std::byte*>(call.send);
          made->given[rank].assign(begin, begin + given_bytes);
        },
        nullptr, made->arrived[rank]);
    for (std::size_t other = 0; other < made->calls.size(); ++other) {
      if (mine.root < 0 || mine.root == static_cast<int>(other)) {
        host_.enqueue(mine.stream, mine.function, nullptr, made->arrived[other], nullptr);
      }
    }
    host_.enqueue(
        mine.stream, mine.function,
        [host, made, rank, bytes, gotten_bytes] {
          const Call& call = made->calls[rank];
          host.writes(call.receive, gotten_bytes);
          if (made->aborted) {
            std::memset(call.receive, 0xAB, gotten_bytes);
          } else if (call.root >= 0) {
            std::memcpy(call.receive, made->given[static_cast<std::size_t>(call.root)].data(), bytes);
          } else if (call.kind == Call::Kind::gather) {
            auto* to = static_cast<std::byte*>(call.receive);
            for (const auto& given : made->given) to = std::copy(given.begin(), given.end(), to);
          } else {
            const std::size_t offset = call.kind == Call::Kind::scatter ? rank * bytes : 0;
            std::vector<const void*> inputs;
            for (const auto& given : made->given) inputs.push_back(given.data() + offset);
            host.reduce(inputs, call.receive, call.count, call.type, call.op);
          }
        },
        made->end, nullptr);
  }

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  NcclHost host_{};
  int version_ = 23007;
  int ids_ = 0;
  std::vector<Fault> faults_;
  std::vector<std::unique_ptr<Communicator>> comms_;
  std::vector<std::pair<int, int>> inits_;  // of this group: id, number of ranks
  std::vector<Call> calls_;                 // of this group
  std::vector<std::shared_ptr<Collective>> under_way_;
  std::vector<std::string> problems_;
  Result group_error_ = kSuccess;
  bool hang_ = false;
  bool released_ = false;
  int depth_ = 0;
  int made_ = 0;
  int aborted_ = 0;
  int inside_ = 0;
};

Fake& instance() {
  static Fake* const the_one = new Fake;
  return *the_one;
}

}  // namespace
}  // namespace fake

fake::Nccl* fake_nccl() { return &fake::instance(); }

extern "C" {

using namespace paceline::nccl;

Result ncclGetVersion(int* version) { return fake::instance().get_version(version); }
const char* ncclGetErrorString(Result result) {
  return result == kUnhandledCudaError ? "unhandled cuda error" : "an error of the fake";
}
const char* ncclGetLastError(Comm) { return "as was ordered"; }
Result ncclGetUniqueId(UniqueId* id) { return fake::instance().get_unique_id(id); }
Result ncclCommInitRankConfig(Comm* comm, int count, UniqueId id, int rank, Config* config) {
  return fake::instance().init(comm, count, id, rank, config);
}
Result ncclCommDestroy(Comm comm) { return fake::instance().end_of(comm, "ncclCommDestroy"); }
#ifndef FAKE_NCCL_INCOMPLETE
Result ncclCommAbort(Comm comm) { return fake::instance().end_of(comm, "ncclCommAbort"); }
#endif
Result ncclCommGetAsyncError(Comm comm, Result* error) { return fake::instance().async_error(comm, error); }
Result ncclGroupStart() { return fake::instance().group_start(); }
Result ncclGroupEnd() { return fake::instance().group_end(); }
Result ncclAllReduce(const void* send, void* receive, std::size_t count, DataType type, ReductionOperation op,
                     Comm comm, cudaStream_t stream) {
  return fake::instance().collective({"ncclAllReduce", send, receive, count, type, -1, comm, stream, op});
}
Result ncclReduceScatter(const void* send, void* receive, std::size_t count, DataType type, ReductionOperation op,
                         Comm comm, cudaStream_t stream) {
  return fake::instance().collective(
      {"ncclReduceScatter", send, receive, count, type, -1, comm, stream, op, fake::Call::Kind::scatter});
}
Result ncclAllGather(const void* send, void* receive, std::size_t count, DataType type, Comm comm,
                     cudaStream_t stream) {
  return fake::instance().collective(
      {"ncclAllGather", send, receive, count, type, -1, comm, stream, kSum, fake::Call::Kind::gather});
}
Result ncclBroadcast(const void* send, void* receive, std::size_t count, DataType type, int root, Comm comm,
                     cudaStream_t stream) {
  return fake::instance().collective({"ncclBroadcast", send, receive, count, type, root, comm, stream});
}

}  // extern "C"
