// SPDX-License-Identifier: Apache-2.0
#include <paceline/runtime/device.hpp>
