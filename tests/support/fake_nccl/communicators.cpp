// SPDX-License-Identifier: Apache-2.0
//
// NCCL's calls except the collectives: communicators and groups.
#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "fake.hpp"

namespace fake {

using namespace paceline::nccl;

Result Fake::get_version(int* version) {
  const std::lock_guard lock(mutex_);
  *version = version_;
  return kSuccess;
}

Result Fake::get_unique_id(UniqueId* id) {
  return call("ncclGetUniqueId", nullptr, [&] {
    std::memset(id->internal, 0, sizeof(id->internal));
    ++ids_;
    std::memcpy(id->internal, &ids_, sizeof(ids_));
    return kSuccess;
  });
}

Result Fake::init(Comm* comm, int count, const UniqueId& id, int rank, const Config* config) {
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

Result Fake::end_of(Comm comm, const char* function) {
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

Result Fake::async_error(Comm comm, Result* error) {
  return call("ncclCommGetAsyncError", comm, [&] {
    *error = comm->error;
    return kSuccess;
  });
}

Result Fake::group_start() {
  return call("ncclGroupStart", nullptr, [&] {
    ++group().depth;
    return kSuccess;
  });
}

}  // namespace fake
