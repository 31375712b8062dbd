// SPDX-License-Identifier: Apache-2.0
//
// Why jobs did not complete.
#include <fmt/format.h>

#include <algorithm>
#include <string>

#include <paceline/error.hpp>

#include "engine/pool/pool_core.hpp"

namespace paceline::internal {
namespace {

/// The error of the job that failed first is nested in it.
class AfterFailed final : public Cancelled, public std::nested_exception {
 public:
  AfterFailed() : Cancelled(kJobDependency) {}
};

}  // namespace

std::exception_ptr cancelled_after(const std::exception_ptr& cause) {
  try {
    std::rethrow_exception(cause);
  } catch (const AfterFailed&) {
    return cause;  // a nest as deep as a chain of jobs is long could not be destroyed
  } catch (...) {
    return std::make_exception_ptr(AfterFailed());
  }
}

std::exception_ptr PoolCore::over_quota(const JobOptions& options, const plan::PoolJob& job) const {
  const plan::PoolTenant tenant = state_.tenants()[job.tenant].tenant;
  const plan::PoolKind& kind = state_.kind(job.kind);
  const bool by_devices = job.gang > tenant.devices;
  const double bytes = static_cast<double>(job.gang) * (kind.peak_bytes + kind.peak_bytes_per_item);
  return std::make_exception_ptr(Rejected(fmt::format(
      "The job was not taken: alone it needs {}, and the quota of tenant '{}' is {}, so it could never start. Let it "
      "need less, or give the tenant more.",
      by_devices ? fmt::format("{} devices at once", job.gang) : fmt::format("{:.4g} bytes at once", bytes),
      options.tenant, by_devices ? fmt::to_string(tenant.devices) : fmt::format("{:.4g} bytes", tenant.memory_bytes))));
}

std::exception_ptr PoolCore::error_of(const plan::PoolEnd& end, const std::exception_ptr& thrown) const {
  using plan::JobOutcome;
  using plan::PoolReason;
  switch (end.outcome) {
    case JobOutcome::completed:
      return {};
    case JobOutcome::rejected:
      if (end.reason == PoolReason::queue_full) {
        return std::make_exception_ptr(
            Rejected("The job was not taken: the queue of its kind is full. Let submit wait, or submit less."));
      }
      if (end.reason == PoolReason::no_device) {
        return std::make_exception_ptr(Rejected(
            "The job was not taken: the pool has too few devices that satisfy its needs, have the memory and are not "
            "lost."));
      }
      return std::make_exception_ptr(
          Rejected(std::string("The job was not taken: by the measured times it would end after its deadline, or make "
                               "another job late that was taken before") +
                   (std::ranges::any_of(devices_, [](const Device& one) { return one.retired && one.released; })
                        ? ", and no released device is back in time for it."
                        : ".")));
    case JobOutcome::expired:
      return std::make_exception_ptr(Expired("The job waited until it could no longer end by its deadline."));
    case JobOutcome::cancelled:
      return std::make_exception_ptr(Cancelled(end.reason == PoolReason::dependency ? kJobDependency : kJobOnRequest));
    case JobOutcome::failed:
      break;
  }
  if (thrown) return thrown;
  if (end.reason == PoolReason::device_lost)
    return std::make_exception_ptr(DeviceLost("The devices that could run the job are lost."));
  return std::make_exception_ptr(OutOfMemory("The job fits in the memory of no device that is left."));
}

}  // namespace paceline::internal
