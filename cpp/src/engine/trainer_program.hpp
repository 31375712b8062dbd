// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <span>

#include <paceline/engine/data_parallel.hpp>
#include <paceline/engine/step.hpp>
#include <paceline/runtime/device_group.hpp>
#include <paceline/runtime/dtype.hpp>

namespace paceline {

/// The work of a trainer with flat parameters, and the memory it works in. One kind for host devices, one for those
/// whose work runs after the call.
///
/// Lifecycle of a step: begin_step() on the caller's thread, the StepProgram's calls on the workers, and then on the
/// caller's thread complete() if every device succeeded, else abandon().
template <class T>
class TrainerProgram : public StepProgram {
 public:
  using Body = typename BasicDataParallel<T>::Body;

  virtual void begin_step(const Body& body, double total_weight) = 0;
  /// Commits the gradients. Returns the objective.
  virtual double complete() = 0;
  /// Returns when no device works for the failed step any more.
  virtual void abandon() = 0;

  [[nodiscard]] virtual std::span<T> parameters() noexcept = 0;
  [[nodiscard]] virtual std::span<T> gradients() noexcept = 0;
  [[nodiscard]] virtual void* stream() const noexcept { return nullptr; }
};

template <class T>
inline constexpr DType kDTypeOf = sizeof(T) == 4 ? DType::float32 : DType::float64;

/// @throws OutOfMemory, Error if a device refuses.
template <class T>
[[nodiscard]] std::shared_ptr<TrainerProgram<T>> make_host_program(const DeviceGroup& group,
                                                                   const DataParallelOptions& options);
template <class T>
[[nodiscard]] std::shared_ptr<TrainerProgram<T>> make_async_program(const DeviceGroup& group,
                                                                    const DataParallelOptions& options);

extern template std::shared_ptr<TrainerProgram<float>> make_host_program(const DeviceGroup&,
                                                                         const DataParallelOptions&);
extern template std::shared_ptr<TrainerProgram<double>> make_host_program(const DeviceGroup&,
                                                                          const DataParallelOptions&);
extern template std::shared_ptr<TrainerProgram<float>> make_async_program(const DeviceGroup&,
                                                                          const DataParallelOptions&);
extern template std::shared_ptr<TrainerProgram<double>> make_async_program(const DeviceGroup&,
                                                                           const DataParallelOptions&);

}  // namespace paceline
