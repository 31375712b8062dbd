// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <future>

namespace paceline {

/// Holds jobs back until it is opened. It is declared before the pool, whose jobs may still be on their way out of
/// pass().
class Gate {
 public:
  void open() { promise_.set_value(); }
  void pass() const { future_.wait(); }

 private:
  std::promise<void> promise_;
  std::shared_future<void> future_ = promise_.get_future().share();
};

}  // namespace paceline
