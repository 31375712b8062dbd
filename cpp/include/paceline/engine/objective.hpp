// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>

#include <paceline/export.hpp>

namespace paceline {

/// The objective of one step: a number that reading may have to wait for. Host devices know it when the step returns;
/// GPUs may still be at the step then. May outlive the trainer. Copies are one number. Any thread.
class PACELINE_API Objective {
 public:
  /// Known already.
  explicit Objective(double value);
  /// Asked when it is read for the first time, and not again once it has answered.
  explicit Objective(std::function<double()> read);

  /// Waits for the devices.
  /// @throws Timeout, DeviceLost, Error if one of them, or NCCL, failed at the step: its gradients are not defined
  /// then.
  [[nodiscard]] double value() const;
  operator double() const { return value(); }  // NOLINT(google-explicit-constructor): a step returns a number

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace paceline
