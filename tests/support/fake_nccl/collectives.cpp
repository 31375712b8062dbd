// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>

#include "fake.hpp"

namespace fake {

using namespace paceline::nccl;

namespace {

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

}  // namespace

Result Fake::group_end() {
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

Result Fake::collective(const Call& wanted) {
  return call(wanted.function, wanted.comm, [&] {
    if (group().depth == 0)
      complain(std::string(wanted.function) + " outside of a group: it would wait for the others");
    if (host_.device_of(wanted.stream) != wanted.comm->device) return kInvalidUsage;
    const auto address =
        reinterpret_cast<std::uintptr_t>(wanted.send) | reinterpret_cast<std::uintptr_t>(wanted.receive);
    if (address % size_of(wanted.type) != 0) complain("a buffer lies across the borders of its elements");
    if (!host_.shared(wanted.send) || !host_.shared(wanted.receive))
      complain(std::string(wanted.function) + " of a buffer that peers cannot access");
    used_.insert(static_cast<const std::byte*>(wanted.send));
    group().calls.push_back(wanted);
    return kSuccess;
  });
}

void Fake::launch(std::vector<Call> calls) {
  while (!calls.empty()) {
    auto made = std::make_shared<Collective>();
    const int id = calls.front().comm->id;
    const auto count = static_cast<std::size_t>(calls.front().comm->count);
    // Take the next call of every rank of that clique, in rank order.
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

void Fake::launch(const std::shared_ptr<Collective>& made, std::size_t rank) {
  const Call& mine = made->calls[rank];
  const std::size_t bytes = mine.count * size_of(mine.type);
  const bool gives = mine.giver < 0 || mine.giver == static_cast<int>(rank);
  // An in-place root already has its result: NCCL writes nothing there.
  const bool has_it = mine.giver == static_cast<int>(rank) && mine.send == mine.receive;
  const bool takes = !has_it && (mine.taker < 0 || mine.taker == static_cast<int>(rank));
  const NcclHost host = host_;
  host_.enqueue(
      mine.stream, mine.function,
      [host, made, rank, bytes, gives] {
        const Call& call = made->calls[rank];
        if (!gives || made->aborted) return;
        host.reads(call.send, bytes);
        const auto* const begin = static_cast<const std::byte*>(call.send);
        made->given[rank].assign(begin, begin + bytes);
      },
      nullptr, made->arrived[rank]);
  for (std::size_t other = 0; takes && other < made->calls.size(); ++other) {
    if (mine.giver < 0 || mine.giver == static_cast<int>(other)) {
      host_.enqueue(mine.stream, mine.function, nullptr, made->arrived[other], nullptr);
    }
  }
  host_.enqueue(
      mine.stream, mine.function,
      [host, made, rank, bytes, takes] {
        const Call& call = made->calls[rank];
        if (!takes) return;
        host.writes(call.receive, bytes);
        if (made->aborted) {
          std::memset(call.receive, 0xAB, bytes);
        } else if (call.giver >= 0) {
          std::memcpy(call.receive, made->given[static_cast<std::size_t>(call.giver)].data(), bytes);
        } else {
          std::vector<const void*> inputs;
          for (const auto& given : made->given) inputs.push_back(given.data());
          host.reduce(inputs, call.receive, call.count, call.type, call.op);
        }
      },
      made->end, nullptr);
}

}  // namespace fake
