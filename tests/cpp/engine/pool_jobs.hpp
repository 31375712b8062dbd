// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include <paceline/engine/pool.hpp>

namespace paceline {

/// A job that returns the name of its device.
inline std::string where_it_ran(Job& job) { return job.device().name; }

}  // namespace paceline
