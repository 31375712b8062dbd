// SPDX-License-Identifier: Apache-2.0
#pragma once

struct CUstream_st;
struct CUevent_st;

namespace paceline {

/// CUDA's own handles, declared here so that a program without CUDA's headers compiles, too: cudaStream_t and
/// cudaEvent_t are these types. A program passes them on as they are.
using NativeStream = ::CUstream_st*;
using NativeEvent = ::CUevent_st*;

}  // namespace paceline
