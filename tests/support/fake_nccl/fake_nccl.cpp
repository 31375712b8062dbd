// SPDX-License-Identifier: Apache-2.0
//
// NCCL's entry points, exported by the shared library.
#include "fake_nccl.hpp"

#include <cstddef>

#include "fake.hpp"

fake::Nccl* fake_nccl() { return &fake::instance(); }

#pragma GCC visibility push(default)
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
Result ncclBroadcast(const void* send, void* receive, std::size_t count, DataType type, int root, Comm comm,
                     cudaStream_t stream) {
  return fake::instance().collective({"ncclBroadcast", send, receive, count, type, root, -1, comm, stream});
}
Result ncclReduce(const void* send, void* receive, std::size_t count, DataType type, ReductionOperation op, int root,
                  Comm comm, cudaStream_t stream) {
  return fake::instance().collective({"ncclReduce", send, receive, count, type, -1, root, comm, stream, op});
}

}  // extern "C"
#pragma GCC visibility pop
