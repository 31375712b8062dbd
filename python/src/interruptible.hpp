// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <paceline/runtime/blocking.hpp>

namespace paceline::python {

/// Runs a step (start(), wait(), cancel()) to its end, and looks for signals at least every 50 ms.
///
/// The step starts without the GIL; with it workers would wake up only to wait for it. If it cannot start, `abandon` is
/// called, with the GIL held. After the first signal nothing further starts, and what runs comes to its end, so that
/// nothing writes gradients after the exception has been thrown; then `abandon` is called. A second signal ends the
/// wait at once.
template <class Step, class Abandon>
void run_interruptibly(Step& step, Abandon abandon) {
  // A flag, because wait() returns true if the step ends while the signal's handler runs.
  bool signalled = false;
  const auto no_signal = [&signalled] {
    signalled = PyErr_CheckSignals() != 0;
    return !signalled;
  };
  bool over = false;
  try {
    const BlockingRegion region;
    step.start();
    over = step.wait([] { return false; });
  } catch (...) {  // what was enqueued for the step must not outlive it
    abandon();
    throw;
  }
  if (!over && no_signal()) step.wait(no_signal);
  if (!signalled) return;
  pybind11::error_already_set interrupt;
  signalled = false;
  step.cancel();
  step.wait(no_signal);
  if (signalled) throw pybind11::error_already_set();
  abandon();
  throw interrupt;  // NOLINT: the object that was caught first is the one to go on
}

}  // namespace paceline::python
