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
  int giver;  // -1: all give
  int taker;  // -1: all take
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

/// What one thread has called since its outermost ncclGroupStart.
struct Group {
  int depth = 0;
  Result error = kSuccess;
  std::vector<std::pair<int, int>> inits;  // id, number of ranks
  std::vector<Call> calls;
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
    made_ = aborted_ = inside_ = 0;
    groups_.clear();
    memory_.clear();
    registered_.clear();
    uses_ = {};
    counts_.clear();
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
  void hang(const std::string& function) override {
    const std::lock_guard lock(mutex_);
    hang_ = true;
    hanging_ = function;
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
  int allocations() const override {
    return of([](const Fake& f) { return static_cast<int>(f.memory_.size()); });
  }
  int registrations() const override {
    return of([](const Fake& f) { return static_cast<int>(f.registered_.size()); });
  }
  Uses uses() const override {
    const std::lock_guard lock(mutex_);
    return uses_;
  }
  int calls(const std::string& function) const override {
    const std::lock_guard lock(mutex_);
    const auto found = counts_.find(function);
    return found == counts_.end() ? 0 : found->second;
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
      if (group().depth == 0) complain("a communicator was made outside of a group, and would wait for the others");
      for (const auto& other : comms_) {
        if (other->id == made->id && other->device == made->device) return kInvalidUsage;
      }
      group().inits.push_back({made->id, count});
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
      const std::size_t left = std::erase_if(registered_, [&](const auto& entry) { return entry.second.comm == comm; });
      if (left > 0 && !abort) complain("a communicator was ended with memory that is registered");
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

  Result mem_alloc(void** data, std::size_t bytes) {
    return call("ncclMemAlloc", nullptr, [&] {
      *data = host_.allocate(host_.current_device(), bytes);
      if (*data == nullptr) return kUnhandledCudaError;
      memory_[*data] = bytes;
      return kSuccess;
    });
  }

  Result mem_free(void* data) {
    return call("ncclMemFree", nullptr, [&] {
      if (memory_.erase(data) == 0) return kInvalidArgument;
      for (const auto& [handle, one] : registered_) {
        if (one.data == data) complain("memory was given back that is still registered");
      }
      host_.free(data);
      return kSuccess;
    });
  }

  Result enroll(Comm comm, void* data, std::size_t bytes, void** handle) {
    return call("ncclCommRegister", comm, [&] {
      const auto memory = memory_.find(data);
      if (memory == memory_.end() || bytes > memory->second) complain("memory was registered that is not NCCL's");
      for (const auto& [other, one] : registered_) {
        if (one.comm == comm && one.data == data) complain("memory was registered twice");
      }
      *handle = reinterpret_cast<void*>(++handles_);
      registered_[*handle] = {comm, data, bytes};
      return kSuccess;
    });
  }

  Result strike(Comm comm, void* handle) {
    return call("ncclCommDeregister", comm, [&] {
      const auto found = registered_.find(handle);
      if (found == registered_.end() || found->second.comm != comm) {
        complain("a registration was ended that is none");
        return kInvalidArgument;
      }
      registered_.erase(found);
      return kSuccess;
    });
  }

  Result async_error(Comm comm, Result* error) {
    return call("ncclCommGetAsyncError", comm, [&] {
      *error = comm->error;
      return kSuccess;
    });
  }

  Result group_start() {
    return call("ncclGroupStart", nullptr, [&] {
      ++group().depth;
      return kSuccess;
    });
  }

  Result group_end() {
    return call("ncclGroupEnd", nullptr, [&] {
      if (--group().depth > 0) return kSuccess;
      Group ended = std::exchange(group(), {});
      if (ended.error != kSuccess) return ended.error;
      for (const auto& [id, count] : ended.inits) {
        const auto of_id = [&](const auto& comm) { return comm->id == id; };
        if (std::count_if(comms_.begin(), comms_.end(), of_id) != count) complain("a group lacks ranks: it would hang");
      }
      launch(std::move(ended.calls));
      return kSuccess;
    });
  }

  Result collective(const Call& wanted) {
    return call(wanted.function, wanted.comm, [&] {
      if (group().depth == 0)
        complain(std::string(wanted.function) + " outside of a group: it would wait for the others");
      if (host_.device_of(wanted.stream) != wanted.comm->device) return kInvalidUsage;
      const auto address =
          reinterpret_cast<std::uintptr_t>(wanted.send) | reinterpret_cast<std::uintptr_t>(wanted.receive);
      if (address % size_of(wanted.type) != 0) complain("a buffer lies across the borders of its elements");
      const bool registered = std::any_of(registered_.begin(), registered_.end(), [&](const auto& entry) {
        const Registration& one = entry.second;
        const auto* const begin = static_cast<const std::byte*>(one.data);
        const auto* const data = static_cast<const std::byte*>(wanted.send);
        return one.comm == wanted.comm && data >= begin &&
               data + wanted.count * size_of(wanted.type) <= begin + one.bytes;
      });
      ++(registered ? uses_.registered : uses_.other);
      group().calls.push_back(wanted);
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
  Group& group() { return groups_[std::this_thread::get_id()]; }

  /// The faults that were ordered, then the body, under the lock.
  template <class Body>
  Result call(const char* function, Comm comm, Body body) {
    std::unique_lock lock(mutex_);
    ++inside_;
    ++counts_[function];
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
      if (result != kSuccess && std::string(function) == "ncclGroupEnd") group() = {};
    }
    if (result == kSuccess) result = body();
    if (result != kSuccess && group().depth > 0) group().error = result;
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
            first.giver != mine.giver || first.taker != mine.taker || first.op != mine.op) {
          return complain("the ranks of a collective do not agree");
        }
      }
      made->given.resize(count);
      for (std::size_t rank = 0; rank < count; ++rank) made->arrived.push_back(host_.make_signal());
      made->end = host_.make_signal();
      const bool hangs = hang_ && (hanging_.empty() || hanging_ == made->calls.front().function);
      if (hangs) {
        hang_ = false;
      } else {
        host_.give(made->end);
      }
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
    const bool gives = mine.giver < 0 || mine.giver == static_cast<int>(rank);
    // Who gives to all in place has what it would take: NCCL writes nothing there.
    const bool has_it = mine.giver == static_cast<int>(rank) && mine.send == mine.receive;
    const bool takes = !has_it && (mine.taker < 0 || mine.taker == static_cast<int>(rank));
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
    for (std::size_t other = 0; takes && other < made->calls.size(); ++other) {
      if (mine.giver < 0 || mine.giver == static_cast<int>(other)) {
        host_.enqueue(mine.stream, mine.function, nullptr, made->arrived[other], nullptr);
      }
    }
    host_.enqueue(
        mine.stream, mine.function,
        [host, made, rank, bytes, gotten_bytes, takes] {
          const Call& call = made->calls[rank];
          if (!takes) return;
          host.writes(call.receive, gotten_bytes);
          if (made->aborted) {
            std::memset(call.receive, 0xAB, gotten_bytes);
          } else if (call.giver >= 0) {
            std::memcpy(call.receive, made->given[static_cast<std::size_t>(call.giver)].data(), bytes);
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

  struct Registration {
    Comm comm = nullptr;
    void* data = nullptr;
    std::size_t bytes = 0;
  };

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  NcclHost host_{};
  int version_ = 23007;
  int ids_ = 0;
  std::vector<Fault> faults_;
  std::vector<std::unique_ptr<Communicator>> comms_;
  std::map<std::thread::id, Group> groups_;
  std::vector<std::shared_ptr<Collective>> under_way_;
  std::vector<std::string> problems_;
  bool hang_ = false;
  std::string hanging_;  // the name of what hangs; empty: anything
  bool released_ = false;
  int made_ = 0;
  int aborted_ = 0;
  int inside_ = 0;
  std::map<void*, std::size_t> memory_;
  std::map<void*, Registration> registered_;
  std::uintptr_t handles_ = 0;
  Uses uses_;
  std::map<std::string, int> counts_;
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
  return fake::instance().collective({"ncclAllReduce", send, receive, count, type, -1, -1, comm, stream, op});
}
Result ncclReduceScatter(const void* send, void* receive, std::size_t count, DataType type, ReductionOperation op,
                         Comm comm, cudaStream_t stream) {
  return fake::instance().collective(
      {"ncclReduceScatter", send, receive, count, type, -1, -1, comm, stream, op, fake::Call::Kind::scatter});
}
Result ncclAllGather(const void* send, void* receive, std::size_t count, DataType type, Comm comm,
                     cudaStream_t stream) {
  return fake::instance().collective(
      {"ncclAllGather", send, receive, count, type, -1, -1, comm, stream, kSum, fake::Call::Kind::gather});
}
Result ncclBroadcast(const void* send, void* receive, std::size_t count, DataType type, int root, Comm comm,
                     cudaStream_t stream) {
  return fake::instance().collective({"ncclBroadcast", send, receive, count, type, root, -1, comm, stream});
}
Result ncclReduce(const void* send, void* receive, std::size_t count, DataType type, ReductionOperation, int root,
                  Comm comm, cudaStream_t stream) {
  return fake::instance().collective({"ncclReduce", send, receive, count, type, -1, root, comm, stream});
}
#ifndef FAKE_NCCL_WITHOUT_MEMORY
Result ncclMemAlloc(void** data, std::size_t bytes) { return fake::instance().mem_alloc(data, bytes); }
Result ncclMemFree(void* data) { return fake::instance().mem_free(data); }
Result ncclCommRegister(Comm comm, void* data, std::size_t bytes, void** handle) {
  return fake::instance().enroll(comm, data, bytes, handle);
}
Result ncclCommDeregister(Comm comm, void* handle) { return fake::instance().strike(comm, handle); }
#endif

}  // extern "C"
