// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include <paceline/export.hpp>

namespace paceline {

/// The objective of one step. Host devices know the number when the step returns. GPUs may still be at the step then,
/// so reading the number waits for them, and ends the caller's lead. That is why it does not turn into a number by
/// itself. An objective may outlive its trainer, and its copies share one number. Any thread.
class PACELINE_API Objective {
 public:
  /// The number is known already.
  explicit Objective(double value);
  struct State;  // the library's own, which alone makes objectives whose number is not known yet

  /// Waits for the devices.
  /// @throws Timeout, DeviceLost, Error if a device or NCCL failed in this step. Its gradients are then undefined.
  [[nodiscard]] double value() const;

 private:
  explicit Objective(std::shared_ptr<State> state);

  std::shared_ptr<State> state_;
};

}  // namespace paceline
