// SPDX-License-Identifier: Apache-2.0
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <paceline/engine/data_parallel.hpp>
#include <paceline/runtime/device.hpp>
#include <paceline/runtime/device_health.hpp>

#include "errors.hpp"
#include "fake_cuda.hpp"
#include "fake_nvml.hpp"
#include "interrupts.hpp"
#include "nvml.hpp"
#include "twins.hpp"

namespace paceline {
namespace {

using cuda::Nvml;
using fake_nvml::Gpu;
using std::chrono::milliseconds;

const std::string kGpu = "0000:01:00.0";
const std::string kOther = "0000:02:00.0";

fake_nvml::State& state() {
  static fake_nvml::State* const found = [] {
    // From here on the process has it, so that the library finds it by its name, as it does the driver's.
    void* const library = dlopen(FAKE_NVML, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) throw std::runtime_error(dlerror());
    return reinterpret_cast<fake_nvml::State* (*)()>(dlsym(library, "fake_nvml_state"))();
  }();
  return *found;
}
[[maybe_unused]] const fake_nvml::State& kOpened = state();  // before any test has asked

/// The fake's state, as new.
fake_nvml::State& fresh() {
  state().gpus = {{kGpu, Gpu{}}, {kOther, Gpu{}}};
  state().status.clear();
  state().delay = milliseconds(0);
  state().overlapped = false;
  state().hangs = false;
  return state();
}

std::optional<double> seconds_under(const DeviceHealth& health, ClockLimit limit) {
  const auto& time = health.limited_for[static_cast<std::size_t>(limit)];
  if (!time) return std::nullopt;
  return std::chrono::duration<double>(*time).count();
}

TEST(Nvml, SaysWhyItIsNotThere) {
  const std::string missing = Nvml("/nowhere/libnvidia-ml.so.1").read(kGpu).why_none;
  EXPECT_EQ(missing.find("NVML cannot be loaded (/nowhere/libnvidia-ml.so.1: "), 0U) << missing;
  const std::string old = Nvml(FAKE_NVML_OLD).read(kGpu).why_none;
  EXPECT_TRUE(says(old, "has no nvmlDeviceGetCurrentClocksEventReasons; drivers from 535 on have it"));
  fresh().status["nvmlInit_v2"] = 9;
  EXPECT_EQ(Nvml().read(kGpu).why_none, "NVML does not start (its error 9); nvidia-smi should say why");
}

TEST(Nvml, ReadsWhatThereIs) {
  Gpu& gpu = fresh().gpus[kGpu];
  gpu.clock_mhz = 1200;
  gpu.limits = 0x4 | 0x20;
  gpu.fields = {{74, {.value = 6'100'000'000}}, {75, {.value = 1'000'000'000}}, {76, {}}};
  gpu.temperature = 83;
  gpu.power_milliwatts = 349500;
  gpu.power_limit_milliwatts = 350000;
  Nvml nvml;
  const DeviceHealth found = nvml.read(kGpu);
  EXPECT_EQ(found.why_none, "");
  EXPECT_EQ(found.clock_hz, 1.2e9);
  EXPECT_EQ(found.max_clock_hz, 1.98e9);
  ASSERT_TRUE(found.limits.has_value());
  EXPECT_EQ(found.limits->to_ullong(), 0x24ULL);
  EXPECT_EQ(seconds_under(found, ClockLimit::power_cap), 6.1);
  EXPECT_EQ(seconds_under(found, ClockLimit::software_thermal), 1.0);
  EXPECT_EQ(seconds_under(found, ClockLimit::sync_boost), 0.0);
  EXPECT_EQ(found.temperature_celsius, 83.0);
  EXPECT_DOUBLE_EQ(found.power_watts.value(), 349.5);
  EXPECT_DOUBLE_EQ(found.power_limit_watts.value(), 350.0);
  EXPECT_EQ(nvml.read("0000:77:00.0").why_none, "NVML does not know the GPU at 0000:77:00.0 (its error 6)");
}

TEST(Nvml, LeavesUnknownWhatFails) {
  fake_nvml::State& fake = fresh();
  for (const char* const name : {"nvmlDeviceGetClockInfo", "nvmlDeviceGetCurrentClocksEventReasons",
                                 "nvmlDeviceGetFieldValues", "nvmlDeviceGetTemperature", "nvmlDeviceGetPowerUsage",
                                 "nvmlDeviceGetEnforcedPowerLimit", "nvmlDeviceGetComputeRunningProcesses_v2"}) {
    fake.status[name] = 15;  // the GPU is lost
  }
  const DeviceHealth found = Nvml().read(kGpu);
  EXPECT_EQ(found.max_clock_hz, 1.98e9) << "what still answers is told";
  EXPECT_FALSE(found.clock_hz || found.limits || found.temperature_celsius || found.power_watts ||
               found.power_limit_watts || found.other_processes);
  EXPECT_EQ(seconds_under(found, ClockLimit::power_cap), std::nullopt);
  EXPECT_TRUE(causes_of(found, found).empty());
}

TEST(Nvml, IgnoresFieldsThatFailOrHaveAnotherType) {
  fresh().gpus[kGpu].fields = {{74, {.value = 7, .type = 1}}, {75, {.value = 2'000'000'000}}, {76, {.status = 3}}};
  const DeviceHealth found = Nvml().read(kGpu);
  EXPECT_EQ(seconds_under(found, ClockLimit::power_cap), std::nullopt);
  EXPECT_EQ(seconds_under(found, ClockLimit::software_thermal), 2.0);
  EXPECT_EQ(seconds_under(found, ClockLimit::sync_boost), std::nullopt);
}

TEST(Nvml, CountsEachOtherProcessOnce) {
  Gpu& gpu = fresh().gpus[kGpu];
  gpu.compute = {{static_cast<std::uint32_t>(getpid()), 1}};
  for (std::uint32_t i = 0; i < 100; ++i) gpu.compute.push_back({3'000'000'000U + i, 10});
  gpu.graphics = {{3'000'000'000U, 10}, {2'999'999'999U, 10}};
  const auto others = Nvml().read(kGpu).other_processes;
  EXPECT_EQ(others.value().count, 101);
  EXPECT_EQ(others->memory_bytes, 1010U);
}

TEST(Nvml, TakesOneOfTheProcessesForUsWhereNumbersAreNotOurs) {
  const std::map<std::uint32_t, std::uint64_t> two{{71, 100}, {72, 200}};
  EXPECT_EQ(cuda::others_among(two, 7, true).count, 2);
  EXPECT_EQ(cuda::others_among(two, 7, true).memory_bytes, 300U);
  EXPECT_EQ(cuda::others_among(two, 7, false).count, 1);
  EXPECT_EQ(cuda::others_among(two, 7, false).memory_bytes, std::nullopt);
  EXPECT_EQ(cuda::others_among(two, 71, false).memory_bytes, 200U) << "a container that shares the host's numbers";
  EXPECT_EQ(cuda::others_among({}, 7, false).count, 0);
  EXPECT_EQ(cuda::others_among({{71, cuda::kUnknownMemory}}, 7, true).memory_bytes, std::nullopt);
}

TEST(Nvml, LetsOnlyOneThreadIn) {
  fake_nvml::State& fake = fresh();
  fake.delay = milliseconds(1);
  Nvml nvml;
  std::vector<std::jthread> threads;
  for (int i = 0; i < 3; ++i) threads.emplace_back([&] { EXPECT_EQ(nvml.read(kGpu).clock_hz, 1.98e9); });
  threads.clear();
  EXPECT_FALSE(fake.overlapped);
}

TEST(Nvml, IsLeftBehindWhileItHangsAndAskedAgainAfterwards) {
  fake_nvml::State& fake = fresh();
  Nvml nvml("libnvidia-ml.so.1", milliseconds(1000));
  fake.hangs = true;
  const std::string why = "NVML has not answered within 1 s: the driver may hang; nvidia-smi would tell";
  EXPECT_EQ(nvml.read(kGpu).why_none, why);
  {
    const Interrupting waits;
    EXPECT_EQ(nvml.read(kGpu).why_none, why) << "and at once";
  }
  EXPECT_EQ(fake.inside, 1) << "who hangs is not asked again";
  fake.hangs = false;
  const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (!nvml.read(kGpu).clock_hz && std::chrono::steady_clock::now() < give_up) {
    std::this_thread::sleep_for(milliseconds(1));
  }
  EXPECT_EQ(nvml.read(kGpu).clock_hz, 1.98e9);
}

TEST(Nvml, IsNotWaitedForByWhoIsInterrupted) {
  fake_nvml::State& fake = fresh();
  Nvml nvml("libnvidia-ml.so.1", std::chrono::seconds(60));
  fake.hangs = true;
  {
    const Interrupting soon;
    EXPECT_THROW(static_cast<void>(nvml.read(kGpu)), Interrupt);
  }
  fake.hangs = false;
  EXPECT_EQ(nvml.read(kGpu).clock_hz, 1.98e9) << "it waits for the one before";
}

TEST(GpuHealth, FindsItsGpuByPciAddressAndTellsCauses) {
  fake::boot({.device_count = 2});
  fake_nvml::State& fake = fresh();
  fake.gpus[kGpu].clock_mhz = 1111;
  fake.gpus[kOther].clock_mhz = 1200;
  fake.gpus[kOther].limits = 0x4;
  const DeviceHealth found = health_of(find_device("cuda:1"));
  EXPECT_EQ(causes_of(found, found),
            std::vector<std::string>{"its clock is at 1.20 of 1.98 GHz because of the power cap of 700 W"});
}

// A kernel of the user: its address is all that a launch needs here.
void backward_kernel(double*, double) {}

TEST(GpuHealth, IsPartOfWhatATrainerExplains) {
  using Trainer = BasicDataParallel<double>;
  fake::boot({.device_count = 2});
  fake::set_twins();
  fake::twin(&backward_kernel, [](const fake::Launch&, double* gradients, double busy) {
    fake::writes(gradients, sizeof(double));
    fake::takes(busy);
  });
  fake_nvml::State& fake_gpus = fresh();
  std::vector<Device> gpus = {find_device("cuda:0"), find_device("cuda:1")};
  gpus[1].device_class = gpus[0].device_class;
  fake_gpus.gpus[kOther].compute = {{static_cast<std::uint32_t>(getpid()), 1}, {3'000'000'000U, 1ULL << 32}};
  fake_gpus.gpus[kGpu].compute = fake_gpus.gpus[kOther].compute;
  Trainer trainer(DeviceGroup(gpus), {.parameter_count = 1});
  for (int step = 0; step < 20; ++step) {
    trainer.step(96, [](const MicroBatch& mb, Trainer::Replica& replica) {
      double* gradients = replica.gradients.data();
      double busy = 1e-3 * static_cast<double>(mb.size()) * (replica.device == 0 ? 1.0 : 2.0);
      void* arguments[] = {&gradients, &busy};
      EXPECT_EQ(cudaLaunchKernel(reinterpret_cast<const void*>(&backward_kernel), dim3(1), dim3(1), arguments, 0,
                                 replica.stream),
                cudaSuccess);
      return 0.0;
    });
  }
  const std::string text = trainer.explain();
  const std::size_t slow = text.find("  cuda:1: share");
  ASSERT_NE(slow, std::string::npos) << text;
  const std::string cause = "    what may slow it: another process uses it (4.0 GiB)\n";
  EXPECT_EQ(text.find(cause, slow), text.find('\n', slow) + 1) << text;
  EXPECT_EQ(text.find(cause), text.rfind(cause)) << "the other GPU is not slow\n" << text;
}

TEST(GpuHealth, IsUnknownForADeviceThatIsGone) {
  fake::boot({.device_count = 1});
  Device device = find_device("cuda:0");
  device.index = 3;
  EXPECT_EQ(health_of(device).why_none, "CUDA does not tell the PCI address of cuda:0");
  EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess) << "an error of ours must not be found by somebody else's check";
}

}  // namespace
}  // namespace paceline
