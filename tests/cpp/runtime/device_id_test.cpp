// SPDX-License-Identifier: Apache-2.0
#include <paceline/device_id.hpp>

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <vector>

#include <paceline/error.hpp>
#include <paceline/per_device.hpp>
#include <paceline/runtime/device_group.hpp>

#include "errors.hpp"
#include "host_group.hpp"

namespace paceline {
namespace {

static_assert(std::is_trivially_copyable_v<DeviceId>);
static_assert(!std::is_convertible_v<DeviceId, std::size_t> && !std::is_constructible_v<std::size_t, DeviceId>);

TEST(DeviceId, IsTheNumberThatADeviceGotWhenItJoined) {
  const DeviceGroup group = host_group(3);
  ASSERT_EQ(group.ids().size(), 3U);
  for (std::size_t place = 0; place < 3; ++place) {
    const DeviceId id = group.ids()[place];
    EXPECT_EQ(id.number(), place);
    EXPECT_EQ(group.place(id), place);
    EXPECT_EQ(group.id(group.devices()[place].name), id);
    EXPECT_EQ(&group.device(id), &group.devices()[place]);
  }
  EXPECT_EQ(group.share().ids(), group.ids());
  EXPECT_TRUE(says(thrown_by<InvalidArgument>([&] { (void)group.place(3); }), "no device 3"));
  EXPECT_THROW((void)group.device(7), InvalidArgument);
  EXPECT_TRUE(says(thrown_by<InvalidArgument>([&] { (void)group.id("host:9"); }), "no device host:9; it has host:0"));
}

TEST(DeviceId, IsOrderedAndHasAHash) {
  EXPECT_TRUE(DeviceId(2) < DeviceId(10) && DeviceId(2) != DeviceId(10) && DeviceId() == DeviceId(0));
  const std::unordered_map<DeviceId, std::string> names{{DeviceId(4), "host:4"}, {DeviceId(1), "host:1"}};
  EXPECT_EQ(names.at(4), "host:4");
}

TEST(PerDevice, FindsTheValuesOfEachDeviceWhenOthersHaveLeftAndWhenOneComes) {
  const std::vector<DeviceId> ids{0, 2, 5};
  PerDevice<std::string> names(ids, {"host:0", "host:2", "host:5"});
  names.add(9, "host:9");
  for (const DeviceId id : names.ids()) EXPECT_EQ(names[id], "host:" + std::to_string(id.number()));
  for (const DeviceId id : {DeviceId(1), DeviceId(3), DeviceId(4), DeviceId(6), DeviceId(8), DeviceId(10)}) {
    EXPECT_EQ(names.find(id), nullptr) << id.number();
    EXPECT_THROW((void)names[id], InvalidArgument);
    EXPECT_THROW((void)names.place(id), InvalidArgument);
  }
  EXPECT_EQ(names.place(5), 2U);
  EXPECT_EQ(names.id(2), DeviceId(5));
  EXPECT_EQ(names.values(), (std::vector<std::string>{"host:0", "host:2", "host:5", "host:9"}));
  std::vector<DeviceId> seen;
  for (auto& [id, name] : names) {
    seen.push_back(id);
    name += "!";
  }
  EXPECT_EQ(seen, names.ids());
  EXPECT_EQ(names[2], "host:2!");
  EXPECT_EQ(PerDevice<int>().find(0), nullptr);
}

TEST(PerDevice, HoldsValuesThatOnlyMove) {
  PerDevice<std::unique_ptr<int>> values(host_group(2).ids());
  values[1] = std::make_unique<int>(3);
  values.add(2) = std::make_unique<int>(4);
  EXPECT_EQ(*values[1] + **values.find(2), 7);
  EXPECT_EQ(values[0], nullptr);
}

}  // namespace
}  // namespace paceline
