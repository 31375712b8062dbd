// SPDX-License-Identifier: Apache-2.0
//
// Errors that CUDA repairs only for a new process: every call on the device throws DeviceLost, and says what to do.
#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <paceline/error.hpp>
#include <paceline/runtime/async_device.hpp>
#include <paceline/runtime/backend.hpp>
#include <paceline/runtime/partition.hpp>

#include "cuda_device.hpp"
#include "error.hpp"
#include "fake_cuda.hpp"
#include "helpers.hpp"
#include "twins.hpp"

namespace paceline::cuda {
namespace {

/// What the message names besides the error: the culprit.
const std::map<int, std::string> kSticky{{cudaErrorIllegalAddress, "compute-sanitizer"},
                                         {cudaErrorLaunchTimeout, "compute-sanitizer"},
                                         {cudaErrorAssert, "compute-sanitizer"},
                                         {cudaErrorHardwareStackError, "compute-sanitizer"},
                                         {cudaErrorIllegalInstruction, "compute-sanitizer"},
                                         {cudaErrorMisalignedAddress, "compute-sanitizer"},
                                         {cudaErrorInvalidAddressSpace, "compute-sanitizer"},
                                         {cudaErrorInvalidPc, "compute-sanitizer"},
                                         {cudaErrorLaunchFailure, "compute-sanitizer"},
                                         {cudaErrorMpsClientTerminated, "MPS server"},
                                         {cudaErrorContextIsDestroyed, "cudaDeviceReset"},
                                         {cudaErrorExternalDevice, "nvidia-smi"},
                                         {cudaErrorECCUncorrectable, "nvidia-smi"},
                                         {cudaErrorNvlinkUncorrectable, "nvidia-smi"},
                                         {226, "nvidia-smi"},
                                         {721, "tensor memory"}};

TEST(LostDevice, IsWhatTheStickyErrorsSay) {
  fake::boot({});
  for (const auto& [code, culprit] : kSticky) {
    const auto lost = thrown_by<DeviceLost>([code = code] { check(static_cast<cudaError_t>(code), "working", 1); });
    EXPECT_EQ(lost.device(), "cuda:1");
    EXPECT_TRUE(says(lost, culprit)) << lost.what();
    EXPECT_TRUE(says(lost, "start again")) << lost.what();
    EXPECT_THROW(check(static_cast<CUresult>(code), "working", 1), DeviceLost) << "of the driver, too";
  }
  for (const cudaError_t code :
       {cudaErrorInvalidValue, cudaErrorLaunchOutOfResources, cudaErrorCooperativeLaunchTooLarge,
        cudaErrorStreamCaptureInvalidated, cudaErrorUnknown}) {
    try {
      check(code, "working", 0);
      FAIL();
    } catch (const DeviceLost& error) {
      ADD_FAILURE() << error.what();
    } catch (const Error&) {
    }
  }
}

/// `push_fails`: the error may come from the first call of all, which makes the device current.
void expect_lost_everywhere(bool push_fails) {
  fake::boot({.device_count = 2, .push_fails = push_fails});
  fake::set_twins();
  const auto device = open_device(0);
  const auto stream = device->make_stream();
  const auto buffer = device->allocate(64, *stream);
  const auto event = device->make_event(true);
  const auto later = device->make_event(true);
  const auto pinned = device->allocate_pinned(64);
  stream->record(*event);
  stream->record(*later);
  wait_for(*later);
  const void* const inputs[] = {buffer->data()};
  const std::map<std::string, std::function<void()>> calls{
      {"open", [] { static_cast<void>(open_device(0)); }},
      {"make_stream", [&] { static_cast<void>(device->make_stream()); }},
      {"make_event", [&] { static_cast<void>(device->make_event(false)); }},
      {"make_event, timed", [&] { static_cast<void>(device->make_event(true)); }},
      {"allocate", [&] { static_cast<void>(device->allocate(8, *stream)); }},
      {"allocate_pinned", [&] { static_cast<void>(device->allocate_pinned(8)); }},
      {"peak_bytes", [&] { static_cast<void>(device->peak_bytes()); }},
      {"shares", [&] { static_cast<void>(device->shares(buffer->data())); }},
      {"record", [&] { stream->record(*event); }},
      {"wait", [&] { stream->wait(*event); }},
      {"zero", [&] { stream->zero(buffer->data(), 64); }},
      {"copy", [&] { stream->copy(pinned->data(), buffer->data(), 64); }},
      {"reduce", [&] { stream->reduce({inputs, buffer->data(), 8, DType::float32, 1.0}); }},
      {"done", [&] { static_cast<void>(event->done()); }},
      {"seconds_since", [&] { static_cast<void>(later->seconds_since(*event)); }},
      {"check_alive", [] { check_alive(0); }},
      {"partition", [] { static_cast<void>(partition("cuda:0", std::vector<double>{0.5, 0.5})); }}};
  fake::poison(0, cudaErrorIllegalAddress);
  for (const auto& [name, call] : calls) {
    const auto lost = thrown_by<DeviceLost>(call);
    EXPECT_EQ(lost.device(), "cuda:0") << name;
    EXPECT_TRUE(says(lost, "cudaErrorIllegalAddress")) << name << ": " << lost.what();
  }
  EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess) << "an error of ours must not be found by somebody else's check";
  EXPECT_NO_THROW(check_alive(1)) << "the others go on";
}

TEST(LostDevice, IsNoticedByEveryCall) { expect_lost_everywhere(false); }
TEST(LostDevice, IsNoticedByEveryCallAlsoWhereItCannotBeMadeCurrent) { expect_lost_everywhere(true); }

}  // namespace
}  // namespace paceline::cuda
