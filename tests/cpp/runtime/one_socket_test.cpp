// SPDX-License-Identifier: Apache-2.0
//
// The cores of workers that hold one lock in turn.
#include <cstdint>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include <paceline/runtime/device.hpp>
#include <paceline/runtime/host_topology.hpp>

namespace paceline {
namespace {

using Cores = std::vector<int>;

/// Made-up cores, each with its node and socket, and GPUs near these nodes.
struct Sockets {
  HostTopology topology{};
  std::vector<Device> gpus{};

  Sockets(const std::vector<std::pair<int, int>>& cores, const std::vector<int>& nodes_of_gpus) {
    for (int index = 0; const auto& [node, socket] : cores) {
      topology.cores.push_back({.index = index++, .numa_node = node, .socket = socket});
    }
    for (std::int32_t index = 0; const int node : nodes_of_gpus) {
      Device gpu;
      gpu.kind = DeviceKind::cuda;
      gpu.index = index++;
      gpu.numa_node = node;
      for (const HostCore& core : topology.cores) {
        if (node >= 0 && core.numa_node == node) gpu.cores.push_back(core.index);
      }
      gpus.push_back(gpu);
    }
  }

  /// The cores of each GPU's worker; empty where they are those near the GPU.
  [[nodiscard]] std::vector<Cores> changed() const {
    std::vector<Cores> all;
    const std::vector<Device> after = on_one_socket(gpus, topology);
    for (std::size_t k = 0; k < gpus.size(); ++k) {
      all.push_back(after[k].cores == gpus[k].cores ? Cores{} : after[k].cores);
      Device same = after[k];
      same.cores = gpus[k].cores;
      EXPECT_EQ(same, gpus[k]) << "only cores change";
    }
    return all;
  }
};

const std::vector<std::pair<int, int>> kTwoSockets{{0, 0}, {0, 0}, {0, 0}, {1, 1}, {1, 1}, {1, 1}};

TEST(OneSocket, IsThatOfMostGpus) {
  EXPECT_EQ(Sockets(kTwoSockets, {0, 1, 1}).changed(), (std::vector<Cores>{{3, 4, 5}, {}, {}}));
}

TEST(OneSocket, IsThatOfTheFirstGpuAmongEquals) {
  EXPECT_EQ(Sockets(kTwoSockets, {1, 0}).changed(), (std::vector<Cores>{{}, {3, 4, 5}}));
  EXPECT_EQ(Sockets(kTwoSockets, {0, 1}).changed(), (std::vector<Cores>{{}, {0, 1, 2}}));
}

TEST(OneSocket, HasSeveralNodesWhoseCoresAllServe) {
  const std::vector<std::pair<int, int>> cores{{0, 0}, {1, 0}, {2, 1}, {3, 1}, {3, 1}};
  EXPECT_EQ(Sockets(cores, {2, 3, 0}).changed(), (std::vector<Cores>{{2, 3, 4}, {2, 3, 4}, {2, 3, 4}}));
  EXPECT_EQ(Sockets(cores, {2, 3, 3}).changed(), (std::vector<Cores>(3))) << "they lie on one socket";
}

TEST(OneSocket, IsANodeWhereTheSystemTellsNoSockets) {
  const std::vector<std::pair<int, int>> cores{{0, -1}, {1, -1}, {1, -1}, {1, -1}};
  EXPECT_EQ(Sockets(cores, {0, 1, 1}).changed(), (std::vector<Cores>{{1, 2, 3}, {}, {}}));
}

TEST(OneSocket, ChangesNothingWhereItIsUnknownOrTooSmall) {
  EXPECT_EQ(Sockets(kTwoSockets, {-1, 1}).changed(), (std::vector<Cores>(2)));
  EXPECT_EQ(Sockets({{-1, -1}, {-1, -1}}, {0, 1}).changed(), (std::vector<Cores>(2)));
  EXPECT_EQ(Sockets({}, {0, 1}).changed(), (std::vector<Cores>(2)));
  EXPECT_EQ(Sockets(kTwoSockets, {0, 0, 1, 1}).changed(), (std::vector<Cores>(4))) << "three cores for four workers";
}

TEST(OneSocket, TakesAGpuOfAnUnknownNodeAlongAndLeavesHostDevices) {
  Sockets machine(kTwoSockets, {-1, 1, 0});
  machine.gpus.push_back(host_device(machine.topology, 0));
  EXPECT_EQ(machine.changed(), (std::vector<Cores>{{3, 4, 5}, {}, {3, 4, 5}, {}}));
}

}  // namespace
}  // namespace paceline
