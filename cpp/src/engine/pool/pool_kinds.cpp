// SPDX-License-Identifier: Apache-2.0
//
// Kinds that are forgotten, models that are freed, and tenants.
#include <fmt/format.h>

#include <algorithm>
#include <ranges>
#include <utility>
#include <vector>

#include <paceline/error.hpp>

#include "engine/pool/pool_core.hpp"

namespace paceline::internal {

void PoolCore::keep_kind(std::size_t kind, std::string name, Pool::BatchCall call) {
  if (kind == kind_list_.size()) kind_list_.emplace_back();
  kind_list_[kind] = {.name = std::move(name),
                      .call = std::move(call),
                      .times = std::deque<plan::LineFit>(devices_.size(), plan::LineFit(kRunsKept))};
}

bool PoolCore::forget(const std::string& kind) {
  check_process("forget");
  std::vector<Kind> gone;  // destroyed without the lock: calls may hold anything
  const std::lock_guard lock(mutex_);
  // What was given up goes on in the call of its kind.
  const auto goes_on = [&](std::size_t number) {
    return std::ranges::any_of(given_up_ | std::views::values, [&](const Run& run) { return run.kind == number; });
  };
  bool all = true;
  for (auto one = kinds_.lower_bound({kind, 0.0}); one != kinds_.end() && one->first.first == kind;) {
    if (goes_on(one->second) || !state_.forget(one->second)) {
      all = false;
      ++one;
      continue;
    }
    gone.push_back(std::exchange(kind_list_[one->second], {}));
    one = kinds_.erase(one);
  }
  return all;
}

bool PoolCore::unload(const std::string& device, const std::string& model) {
  check_process("unload");
  const std::lock_guard lock(mutex_);
  const auto found = std::ranges::find(devices_, device, [](const Device& one) { return one.facts.name; });
  if (found == devices_.end()) return false;  // it is about to join
  return state_.unload(static_cast<std::size_t>(found - devices_.begin()), model);
}

std::size_t PoolCore::tenant_of(const std::string& name) {
  const auto known = tenants_.find(name);
  if (known != tenants_.end()) return known->second;
  return tenants_[name] = state_.add_tenant({.name = name});
}

void PoolCore::add_tenant(plan::PoolTenant tenant) {
  check_process("add_tenant");
  const std::lock_guard lock(mutex_);
  if (tenants_.contains(tenant.name)) {
    throw InvalidArgument(
        fmt::format("add_tenant: the pool has a tenant '{}' already. Name it before its first job.", tenant.name));
  }
  const std::string name = tenant.name;
  tenants_[name] = state_.add_tenant(std::move(tenant));
}

std::vector<plan::PoolTenantUse> PoolCore::tenants() const {
  check_process("tenants");
  const std::lock_guard lock(mutex_);
  return state_.tenants();
}

}  // namespace paceline::internal
