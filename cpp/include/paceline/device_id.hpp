// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

namespace paceline {

/// A device's number in its group: its place in DeviceGroup::devices(), counted from 0. The number is the device's own
/// for as long as the group lives. Retiring a device and taking it back changes no number.
using DeviceId = std::size_t;

}  // namespace paceline
