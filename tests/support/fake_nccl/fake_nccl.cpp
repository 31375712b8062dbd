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
Result ncclMemAlloc(void** data, std::size_t bytes) { return fake::instance().mem_alloc(data, bytes); }
Result ncclMemFree(void* data) { return fake::instance().mem_free(data); }
Result ncclCommRegister(Comm comm, void* data, std::size_t bytes, void** handle) {
  return fake::instance().enroll(comm, data, bytes, handle);
}
Result ncclCommDeregister(Comm comm, void* handle) { return fake::instance().strike(comm, handle); }

}  // extern "C"
#pragma GCC visibility pop
