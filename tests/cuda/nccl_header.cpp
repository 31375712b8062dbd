// SPDX-License-Identifier: Apache-2.0
//
// paceline's own declarations of NCCL (cuda/nccl_api.hpp) against NVIDIA's header. Only compiled.
#include <nccl.h>

#include <cstddef>
#include <type_traits>

#include "nccl_api.hpp"

namespace paceline::nccl {
namespace {

// A type of theirs in our words. Enumerations go by their size: both sides pass them as int.
template <class T>
struct Ours {
  using Type = T;
};
template <>
struct Ours<ncclComm_t> {
  using Type = Comm;
};
template <>
struct Ours<ncclComm_t*> {
  using Type = Comm*;
};
template <>
struct Ours<ncclResult_t> {
  using Type = Result;
};
template <>
struct Ours<ncclResult_t*> {
  using Type = Result*;
};
template <>
struct Ours<ncclDataType_t> {
  using Type = DataType;
};
template <>
struct Ours<ncclRedOp_t> {
  using Type = ReductionOperation;
};
template <>
struct Ours<ncclUniqueId> {
  using Type = UniqueId;
};
template <>
struct Ours<ncclUniqueId*> {
  using Type = UniqueId*;
};
template <>
struct Ours<ncclConfig_t*> {
  using Type = Config*;
};

template <class F>
struct Translated;
template <class R, class... A>
struct Translated<R(A...)> {
  using Type = typename Ours<R>::Type(typename Ours<A>::Type...);
};

#define SAME_FUNCTION(ours, theirs) \
  static_assert(std::is_same_v<ours, typename Translated<std::remove_pointer_t<decltype(&theirs)>>::Type>)

SAME_FUNCTION(GetVersion, ncclGetVersion);
SAME_FUNCTION(GetErrorString, ncclGetErrorString);
SAME_FUNCTION(GetLastError, ncclGetLastError);
SAME_FUNCTION(GetUniqueId, ncclGetUniqueId);
SAME_FUNCTION(CommInitRankConfig, ncclCommInitRankConfig);
SAME_FUNCTION(CommDestroy, ncclCommDestroy);
SAME_FUNCTION(CommAbort, ncclCommAbort);
SAME_FUNCTION(CommGetAsyncError, ncclCommGetAsyncError);
SAME_FUNCTION(GroupStart, ncclGroupStart);
SAME_FUNCTION(GroupEnd, ncclGroupEnd);
SAME_FUNCTION(AllReduce, ncclAllReduce);
SAME_FUNCTION(Broadcast, ncclBroadcast);
SAME_FUNCTION(Reduce, ncclReduce);

static_assert(sizeof(ncclResult_t) == sizeof(Result) && sizeof(ncclDataType_t) == sizeof(DataType) &&
              sizeof(ncclRedOp_t) == sizeof(ReductionOperation) && sizeof(ncclUniqueId) == sizeof(UniqueId));

constexpr bool same(int ours, int theirs) { return ours == theirs; }
static_assert(same(kSuccess, ncclSuccess) && same(kUnhandledCudaError, ncclUnhandledCudaError) &&
              same(kSystemError, ncclSystemError) && same(kInternalError, ncclInternalError) &&
              same(kInvalidArgument, ncclInvalidArgument) && same(kInvalidUsage, ncclInvalidUsage) &&
              same(kRemoteError, ncclRemoteError) && same(kInProgress, ncclInProgress));
static_assert(same(kInt8, ncclInt8) && same(kInt32, ncclInt32) && same(kInt64, ncclInt64) &&
              same(kFloat16, ncclFloat16) && same(kFloat32, ncclFloat32) && same(kFloat64, ncclFloat64) &&
              same(kBfloat16, ncclBfloat16) && same(kSum, ncclSum) && same(kMax, ncclMax) && same(kMin, ncclMin));

// The beginning of their Config, which is all that ours has.
constexpr ncclConfig_t kTheirs = NCCL_CONFIG_INITIALIZER;
constexpr Config kOurs;
static_assert(kOurs.magic == kTheirs.magic && kOurs.version <= kTheirs.version && kOurs.size <= kTheirs.size &&
              kOurs.blocking == kTheirs.blocking && kOurs.net_name == kTheirs.netName &&
              kOurs.traffic_class == kTheirs.trafficClass);
static_assert(offsetof(Config, magic) == offsetof(ncclConfig_t, magic) &&
              offsetof(Config, version) == offsetof(ncclConfig_t, version) &&
              offsetof(Config, blocking) == offsetof(ncclConfig_t, blocking) &&
              offsetof(Config, cga_cluster_size) == offsetof(ncclConfig_t, cgaClusterSize) &&
              offsetof(Config, min_ctas) == offsetof(ncclConfig_t, minCTAs) &&
              offsetof(Config, max_ctas) == offsetof(ncclConfig_t, maxCTAs) &&
              offsetof(Config, net_name) == offsetof(ncclConfig_t, netName) &&
              offsetof(Config, split_share) == offsetof(ncclConfig_t, splitShare) &&
              offsetof(Config, traffic_class) == offsetof(ncclConfig_t, trafficClass));

}  // namespace
}  // namespace paceline::nccl
