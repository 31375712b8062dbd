// SPDX-License-Identifier: Apache-2.0
//
// The links between GPUs: what they are called, how fast they are, and what follows for parameters.
#include <paceline/comm/gpu_links.hpp>

#include <gtest/gtest.h>

#include <chrono>
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include <paceline/engine/device_queues.hpp>
#include <paceline/runtime/device_group.hpp>

#include "comm/measured_links.hpp"
#include "comm/memory_spaces.hpp"
#include "fake_cuda.hpp"
#include "helpers.hpp"
#include "twins.hpp"

namespace paceline {
namespace {

constexpr std::chrono::seconds kBudget{60};  // the fake copies by the host

void boot_machine(const fake::Settings& settings) {
  fake::boot(settings);
  fake::set_twins();
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
}

void set_links(int gpus, double from_first, double between_others) {
  for (int from = 0; from < gpus; ++from) {
    for (int to = 0; to < gpus; ++to) fake::set_link(from, to, from == 0 ? from_first : between_others);
  }
}

GpuLinks measured(const std::vector<std::string>& names, std::chrono::nanoseconds budget = kBudget) {
  const internal::MemorySpaces memory(group_of(names));
  return internal::measure_links(memory.endpoints(), budget, kBudget);
}

/// The links as they are known for the rest of the process. A sanitizer makes copies slow, and a second is not enough.
GpuLinks known(const DeviceGroup& group) {
  const internal::MemorySpaces memory(group);
  return internal::known_links(memory.endpoints(), kBudget);
}

TEST(GpuLinks, HaveNamesAndTheSpeedOfEachDirection) {
  boot_machine({.device_count = 3, .switch_size = 3, .nvlink = true});
  set_links(3, 20e9, 50e9);
  const GpuLinks links = measured({"cuda:0", "cuda:1", "cuda:2", "host:0"});
  ASSERT_EQ(links.pairs.size(), 6U);
  for (const GpuLink& link : links.pairs) {
    EXPECT_EQ(link.kind, LinkKind::nvlink);
    EXPECT_NEAR(link.bytes_per_second, link.from == "cuda:0" ? 20e9 : 50e9, 1e8) << link.from << " to " << link.to;
  }
  EXPECT_NEAR(links.spread_bytes_per_second, 40e9, 2e8);
  EXPECT_NEAR(links.exchange_bytes_per_second, 50e9, 2e8);
  EXPECT_EQ(fake::problems(), std::vector<std::string>{});
  EXPECT_EQ(fake::leftovers(), fake::Leftovers{});
}

TEST(GpuLinks, AreAlsoMeasuredWithTheSourceCopying) {
  boot_machine({.device_count = 3, .switch_size = 2});
  set_links(3, 10e9, 10e9);
  fake::set_push(0, 1, 24e9);
  for (const GpuLink& link : measured({"cuda:0", "cuda:1", "cuda:2"}).pairs) {
    const bool through_host = link.from == "cuda:2" || link.to == "cuda:2";
    const double push = through_host ? 0.0 : link.from == "cuda:0" ? 24e9 : 10e9;
    EXPECT_NEAR(link.push_bytes_per_second, push, 1e8) << link.from << " to " << link.to;
    if (!through_host) {
      EXPECT_NEAR(link.bytes_per_second, 10e9, 1e8);
    }
  }
  EXPECT_EQ(fake::problems(), std::vector<std::string>{});
  EXPECT_EQ(fake::leftovers(), fake::Leftovers{});
}

/// The speed at which a stream of the target copies 32 MiB to it, when all streams that it needs have the same time.
double speed_of_a_copy(AsyncDevice& source, AsyncDevice& target) {
  constexpr std::size_t kBytes = std::size_t{32} << 20;
  const auto writer = source.make_stream(), stream = target.make_stream();
  const auto written = source.make_event(false), start = target.make_event(true), end = target.make_event(true);
  const auto from = source.allocate(kBytes, *writer), to = target.allocate(kBytes, *stream);
  writer->zero(from->data(), kBytes);
  writer->record(*written);
  stream->wait(*written);
  stream->copy(to->data(), from->data(), kBytes);
  stream->record(*start);
  stream->copy(to->data(), from->data(), kBytes);
  stream->record(*end);
  writer->wait(*end);
  wait_for(*end);
  return static_cast<double>(kBytes) / end->seconds_since(*start);
}

TEST(Pushes, PayWhereTheyAreFasterByMoreThanATenth) {
  EXPECT_TRUE(pushes_pay(10e9, 24e9));
  EXPECT_FALSE(pushes_pay(10e9, 10.9e9)) << "may be noise";
  EXPECT_FALSE(pushes_pay(24e9, 10e9));
  EXPECT_FALSE(pushes_pay(10e9, 0.0)) << "unknown";
  EXPECT_FALSE(pushes_pay(0.0, 10e9));
}

TEST(Pushes, AreMadeForThePairsWhereTheyWereFaster) {
  boot_machine({.device_count = 3, .switch_size = 3});
  set_links(3, 10e9, 10e9);
  fake::set_push(0, 1, 24e9);
  fake::set_push(0, 2, 20e9);
  fake::set_push(1, 2, 10.5e9);
  fake::set_push(2, 1, 5e9);
  {
    const internal::MemorySpaces memory(group_of({"cuda:0", "cuda:1", "cuda:2"}));
    const std::vector<internal::Endpoint> gpus = memory.endpoints();
    EXPECT_NEAR(speed_of_a_copy(*gpus[0].opened, *gpus[1].opened), 10e9, 1e8) << "nothing is measured yet";
    const GpuLinks links = internal::measure_links(gpus, kBudget, kBudget);
    for (const GpuLink& link : links.pairs) {
      EXPECT_EQ(link.pushed, link.from == "cuda:0") << link.from << " to " << link.to;
      EXPECT_NEAR(link.bytes_per_second, 10e9, 1e8);
    }
    EXPECT_NEAR(links.spread_bytes_per_second, 40e9, 4e8)
        << "as they are copied from now on, and the slower one counts";
    EXPECT_NEAR(links.exchange_bytes_per_second, 10e9, 1e8);
    EXPECT_NEAR(links.pairs.front().used_bytes_per_second(), 24e9, 1e8);
    EXPECT_NEAR(speed_of_a_copy(*gpus[0].opened, *gpus[1].opened), 24e9, 1e8);
    EXPECT_NEAR(speed_of_a_copy(*gpus[1].opened, *gpus[2].opened), 10e9, 1e8);
    EXPECT_NEAR(speed_of_a_copy(*gpus[2].opened, *gpus[1].opened), 10e9, 1e8);
    // Measured again, where pushes no longer pay; the pulls are those without pushes.
    for (const int to : {1, 2}) fake::set_push(0, to, 8e9);
    const GpuLinks again = internal::measure_links(gpus, kBudget, kBudget);
    EXPECT_NEAR(again.pairs.front().bytes_per_second, 10e9, 1e8);
    EXPECT_FALSE(again.pairs.front().pushed);
    EXPECT_NEAR(speed_of_a_copy(*gpus[0].opened, *gpus[1].opened), 10e9, 1e8);
  }
  EXPECT_EQ(fake::problems(), std::vector<std::string>{});
  EXPECT_EQ(fake::leftovers(), fake::Leftovers{});
}

TEST(Pushes, StayAsTheyWereWhereNothingCouldBeMeasured) {
  boot_machine({.device_count = 2});
  set_links(2, 10e9, 10e9);
  fake::set_push(0, 1, 24e9);
  const internal::MemorySpaces memory(group_of({"cuda:0", "cuda:1"}));
  const std::vector<internal::Endpoint> gpus = memory.endpoints();
  EXPECT_TRUE(internal::measure_links(gpus, kBudget, kBudget).pairs.front().pushed);
  const GpuLinks unknown = internal::measure_links(gpus, std::chrono::nanoseconds(0), kBudget);
  EXPECT_EQ(unknown.pairs.front().bytes_per_second, 0.0);
  EXPECT_TRUE(unknown.pairs.front().pushed);
  EXPECT_FALSE(unknown.pairs.back().pushed);
  EXPECT_NEAR(speed_of_a_copy(*gpus[0].opened, *gpus[1].opened), 24e9, 1e8);
}

TEST(Pushes, ComeBackForGpusThatWereOpenedAgain) {
  boot_machine({.device_count = 6, .switch_size = 6});
  fake::set_link(4, 5, 10e9);
  fake::set_link(5, 4, 10e9);
  fake::set_push(4, 5, 24e9);
  for (int round = 0; round < 2; ++round) {
    const internal::MemorySpaces memory(group_of({"cuda:4", "cuda:5"}));
    const std::vector<internal::Endpoint> gpus = memory.endpoints();
    EXPECT_TRUE(internal::known_links(gpus, kBudget).pairs.front().pushed);
    EXPECT_NEAR(speed_of_a_copy(*gpus[0].opened, *gpus[1].opened), 24e9, 1e8) << "round " << round;
  }
}

TEST(GpuLinks, GoByPcieOrThroughTheHost) {
  boot_machine({.device_count = 3, .switch_size = 2});
  const GpuLinks links = measured({"cuda:0", "cuda:1", "cuda:2"});
  for (const GpuLink& link : links.pairs) {
    const bool neighbours = link.from != "cuda:2" && link.to != "cuda:2";
    EXPECT_STREQ(name_of(link.kind), neighbours ? "PCIe peer" : "through the host");
    EXPECT_GT(link.bytes_per_second, 0.0);
  }
  EXPECT_EQ(fake::problems(), std::vector<std::string>{});
  EXPECT_EQ(fake::leftovers(), fake::Leftovers{});
}

TEST(GpuLinks, OfPartsOfOneGpuAreNone) {
  boot_machine({});
  EXPECT_TRUE(measured({"cuda:0/0", "cuda:0/1"}).pairs.empty());
}

TEST(GpuLinks, StayUnknownWithoutMemoryOrTime) {
  boot_machine({.device_count = 2, .memory_bytes = std::size_t{1} << 20});
  const GpuLinks links = measured({"cuda:0", "cuda:1"});
  ASSERT_EQ(links.pairs.size(), 2U);
  EXPECT_EQ(links.pairs[0].bytes_per_second, 0.0);
  EXPECT_EQ(links.pairs[0].kind, LinkKind::pcie_peer);
  boot_machine({.device_count = 2});
  EXPECT_EQ(measured({"cuda:0", "cuda:1"}, std::chrono::nanoseconds(0)).pairs[1].bytes_per_second, 0.0);
  EXPECT_EQ(fake::problems(), std::vector<std::string>{});
  EXPECT_EQ(fake::leftovers(), fake::Leftovers{}) << "memory under way is given back in order";
}

TEST(GpuLinks, GiveTheLentMemoryBack) {
  boot_machine({.device_count = 3, .switch_size = 3});
  const internal::MemorySpaces memory(group_of({"cuda:0", "cuda:1", "cuda:2"}));
  EXPECT_GT(internal::measure_links(memory.endpoints(), kBudget, kBudget).pairs[0].bytes_per_second, 0.0);
  EXPECT_EQ(fake::unused_pool_bytes(), 0U);
}

TEST(GpuLinks, AreMeasuredAgainIfThatFailed) {
  const std::vector<std::string> names{"cuda:2", "cuda:3"};
  boot_machine({.device_count = 4, .memory_bytes = std::size_t{1} << 20});
  EXPECT_EQ(measure_links(group_of(names)).pairs[0].bytes_per_second, 0.0);
  boot_machine({.device_count = 4, .switch_size = 4});
  EXPECT_GT(known(group_of(names)).pairs[0].bytes_per_second, 0.0);
}

TEST(Relays, PayWhereTheFirstGpuSendsNoFasterToAllThanToOne) {
  EXPECT_TRUE(relays_pay(3, 25e9, 25e9)) << "a switch: its port is what everyone shares";
  EXPECT_TRUE(relays_pay(7, 400e9, 400e9));
  EXPECT_FALSE(relays_pay(3, 75e9, 25e9)) << "links of their own to each of the others";
  EXPECT_FALSE(relays_pay(3, 25e9, 5e9)) << "the others have only the host between them";
  EXPECT_TRUE(relays_pay(2, 25e9, 25e9)) << "half of the time";
  EXPECT_FALSE(relays_pay(2, 25e9, 12.6e9)) << "hardly faster is not worth the waits";
  EXPECT_TRUE(relays_pay(3, 0.0, 0.0)) << "unknown";
}

/// Whether the third GPU has to wait for what the second one relays.
void expect_relays(const std::vector<std::string>& names, double from_first, double between_others, bool relays) {
  boot_machine({.device_count = 4, .switch_size = 4});
  set_links(4, from_first, between_others);
  if (relays) fake::set_link(0, 1, between_others);  // the second GPU is near
  const DeviceGroup group = group_of(names);
  static_cast<void>(known(group));
  DeviceQueues queues(group, {.measure_links = true});
  EXPECT_EQ(queues.links().pairs.size(), 6U);
  const std::string words = relays ? ", parameters relayed from GPU to GPU" : ", all parameters from the first GPU";
  EXPECT_TRUE(queues.transport().ends_with(words)) << queues.transport();
  constexpr std::size_t kBytes = std::size_t{1} << 20;
  std::vector<std::unique_ptr<Buffer>> memory;
  std::vector<SpaceCopy> copies;
  for (std::size_t s = 0; s < 3; ++s) {
    Stream& stream = s == 0 ? queues.home_stream() : *queues.copy_stream(s);
    memory.push_back(queues.maker(s).allocate(kBytes, stream));
    if (s > 0) copies.push_back({s, memory[s]->data(), memory[0]->data(), kBytes});
  }
  queues.home_stream().zero(memory[0]->data(), kBytes);
  fake::hang(queues.copy_stream(1)->native());
  static_cast<void>(queues.begin_step(copies));
  const std::unique_ptr<Event> arrived = queues.maker(2).make_event(false);
  queues.copy_stream(2)->record(*arrived);
  for (int tries = 0; tries < 1000 && !arrived->done();) ++tries;
  EXPECT_EQ(arrived->done(), !relays);
  fake::go_on(queues.copy_stream(1)->native());
  queues.drain();
}

TEST(Relays, AreUsedWhereTheyPay) {
  expect_relays({"cuda:0", "cuda:1", "cuda:2"}, 10e9, 100e9, true);
  expect_relays({"cuda:0", "cuda:2", "cuda:3"}, 20e9, 10e9, false);
}

TEST(Relays, AreUsedWhereNothingWasMeasured) {
  boot_machine({.device_count = 3, .switch_size = 3});
  DeviceQueues queues(group_of({"cuda:0", "cuda:1", "cuda:2"}), {});
  EXPECT_TRUE(queues.links().pairs.empty());
  EXPECT_TRUE(queues.transport().ends_with("by PCIe peer access")) << queues.transport();
}

TEST(GpuLinks, AreMeasuredOnceInAProcess) {
  boot_machine({.device_count = 2, .switch_size = 2});
  set_links(2, 5e9, 5e9);
  const DeviceGroup group = group_of({"cuda:1", "cuda:0"});
  static_cast<void>(known(group));
  const double first = measure_links(group).pairs[0].bytes_per_second;
  EXPECT_NEAR(first, 5e9, 1e8);
  set_links(2, 50e9, 50e9);
  EXPECT_EQ(measure_links(group).pairs[0].bytes_per_second, first);
}

}  // namespace
}  // namespace paceline
