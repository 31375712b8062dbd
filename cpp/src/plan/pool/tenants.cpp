// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <ranges>
#include <set>
#include <utility>
#include <vector>

#include "plan/pool/state.hpp"
#include "refuse.hpp"

namespace paceline::plan {

using State = PoolState::State;

// From now on there are several tenants. What waits joins them.
void State::share() {
  if (has_tenants) return;
  has_tenants = true;
  for (const Job& one : jobs.slots()) {
    if (one.id == JobId{}) continue;
    Job& job = jobs.at(one.id);
    turn_of(job.id) = {};
    if (job.phase == Job::Phase::runs) continue;
    hold_for(job, 1);
    if (job.phase != Job::Phase::held) join(job, job.phase == Job::Phase::in_line ? &lines[job.line] : nullptr);
  }
}

// So many more jobs of its kind and its tenant wait.
void State::hold_for(const Job& job, std::int64_t more) {
  tenants[job.tenant].waiting += more;
  std::map<std::size_t, std::int64_t>& by = kinds[job.kind].held_by;
  const auto own = by.try_emplace(job.tenant, 0).first;
  if ((own->second += more) == 0) by.erase(own);
}

std::int64_t State::held_for(std::size_t kind, std::size_t tenant) const {
  const auto own = kinds[kind].held_by.find(tenant);
  return own == kinds[kind].held_by.end() ? 0 : own->second;
}

// A job that may start waits with those of its tenant. `line`: null for a gang.
void State::join(Job& job, PoolLine* line) {
  if (line != nullptr) {
    line->tenants[job.tenant][queue_of(job)].insert({job.key, job.id});
  } else {
    tenants[job.tenant].gangs.emplace(job.background, job.key, job.id);
  }
  if (job.timed()) return;
  ++tenants[job.tenant].plain[queue_of(job)];
  double& place = turn_of(job.id).place;
  if (place == kNever) place = job.key;  // otherwise it gets back the one with which it left
  if (line != nullptr) line->places[queue_of(job)].insert({place, job.id});
}

void State::leave(const Job& job, PoolLine* line) {
  if (line != nullptr) {
    const auto own = line->tenants.find(job.tenant);
    own->second[queue_of(job)].erase({job.key, job.id});
    if (std::ranges::all_of(own->second, &KeyQueue::empty)) line->tenants.erase(own);
  } else {
    tenants[job.tenant].gangs.erase({job.background, job.key, job.id});
  }
  if (job.timed()) return;
  if (line != nullptr) line->places[queue_of(job)].erase({turn_of(job.id).place, job.id});
  if (--tenants[job.tenant].plain[queue_of(job)] > 0) return;
  for (FairTags& tags : fair) {
    if (tags.tags.empty()) continue;
    FairTags::Tag& of = tags.tags[job.tenant][queue_of(job)];
    if (of.debt > 0.0) of.start = tags.start_tag(job.tenant, queue_of(job)) + std::exchange(of.debt, 0.0);
  }
}

// Needs that the same devices satisfy share a queue, until a device comes that tells them apart.
void State::find_sets(std::size_t from) {
  for (std::size_t need = from; need < accepted.size(); ++need) {
    const auto same = static_cast<std::size_t>(std::ranges::find(accepted, accepted[need]) - accepted.begin());
    if (need == sets.size()) {
      sets.push_back(same);
      fair.emplace_back().tags.resize(same == need ? tenants.size() : 0);
    } else if (sets[need] != same) {
      if (same == need) fair[1 + need] = fair[1 + sets[need]];
      sets[need] = same;
    }
  }
}

// A job that starts is charged so much over its tenant's weight, before it leaves. Returns its start tag; infinity: it
// has none.
double State::charge(const Job& job, double added, FairTags& tags) {
  const auto cls = static_cast<std::size_t>(job.priority);
  FairTags::Tag& of = tags.tags[job.tenant][cls];
  const double tag = tags.start_tag(job.tenant, cls);
  if (job.timed()) {
    (tenants[job.tenant].plain[cls] > 0 ? of.debt : of.start = tag) += added;
    return kNever;
  }
  of.start = tag + added + std::exchange(of.debt, 0.0);
  return tag;
}

// The tenants that may start a job of this priority in a line.
std::vector<std::size_t> State::starters(const PoolLine& line, std::size_t cls) const {
  std::vector<std::size_t> found;
  for (const auto& [tenant, queues] : line.tenants) {
    if (!queues[cls].empty() && may_start(tenant, queues[cls].front(), line.kind, 1, 1)) found.push_back(tenant);
  }
  return found;
}

// The virtual time passes tenants whose jobs no idle device takes: these have saved up nothing. Tenants that wait in
// the same lines keep their distances: all tags of a line rise by as much as its least tag has to. A tenant that waits
// in several lines rises by the smallest of these. Each gang is a line of its own, so one that finds no devices puts
// off no other.
void State::pass_over(FairTags& tags, std::size_t cls, double to) {
  std::map<std::size_t, double> ahead;  // of each tenant: the largest of its lines' least tags
  const auto look = [&](std::span<const std::size_t> line) {
    const double least = tags.least_tag(line, cls);
    for (const std::size_t tenant : line) ahead[tenant] = std::max(ahead[tenant], least);
  };
  for (const std::size_t at : active_lines) {
    if (&tags == &fair[1 + sets[lines[at].need]]) look(starters(lines[at], cls));
  }
  for (const JobId id : first_gangs()) {
    const Job& job = jobs.at(id);
    if (queue_of(job) != cls || &tags != &fair[1 + sets[job.need]]) continue;
    const std::array<std::size_t, 1> one{job.tenant};
    if (may_start(job.tenant, {job.key, id}, job.kind, job.gang, 1)) look(one);
  }
  for (const auto& [tenant, least] : ahead) {
    if (least < to) tags.tags[tenant][cls].start = tags.start_tag(tenant, cls) + to - least;
  }
}

// A job without a deadline that starts takes this place of its priority, in exchange for its own; null: it keeps that.
void State::take_turn(const Job& job, PoolLine* line, const KeyEntry* place) {
  if (place == nullptr || place->id == job.id) return;
  const auto move = [&](JobId id, PoolLine* of_line, double to) {
    double& own = turn_of(id).place;
    if (of_line != nullptr) {
      KeyQueue& queue = of_line->places[static_cast<std::size_t>(job.priority)];
      queue.erase({own, id});
      queue.insert({to, id});
    }
    own = to;
  };
  const KeyEntry taken = *place;  // it may be in a queue that changes
  const Job& other = jobs.at(taken.id);
  const double left = turn_of(job.id).place;
  move(taken.id, other.phase == Job::Phase::in_line ? &lines[other.line] : nullptr, left);
  move(job.id, line, taken.key);
}

// In which of tags_of() the jobs of a start are charged. A tenant whose tag, as the start begins, is larger than that
// of the first job, and than that of somebody who waits elsewhere, fills up a batch of others. It takes nobody's turn,
// and its tag would get ahead without bound. So it is charged only among those who fill up batches of this line. Proof
// of the bound in pool.hpp: who is charged in a queue had a tag of at most the first job's or the least elsewhere, and
// start_jobs() moves the virtual time v up to that tag. So after it no tag is above v + what the start charged over the
// weight, and who waits has none below v. Where v passes who waits, pass_over() keeps the distances of those in the
// same lines. So between two of them the tags' difference, which the charges over the weights make, stays within the
// bound. A batch is filled up only when those who are charged have no more jobs in the line. Then two who still wait
// there both fill it up, in the order of tags of which none is more than one job ahead.
std::vector<std::array<bool, 3>> State::charged_in(std::span<const JobId> starting, const PoolLine* line, JobId lead) {
  const std::array<FairTags*, 3> all = tags_of(jobs.at(starting.front()));
  const auto plain = [&](JobId id) { return id != JobId{} && !jobs.at(id).timed(); };
  const auto leads = plain(lead) ? std::ranges::find(starting, lead) : std::ranges::find_if(starting, plain);
  std::vector<std::array<bool, 3>> found(starting.size());
  for (std::size_t k = 0; k < 2; ++k) {
    std::array<double, kClasses> most = {};
    if (line != nullptr) most = line->elsewhere[k];
    if (leads != starting.end()) {
      const auto cls = static_cast<std::size_t>(jobs.at(*leads).priority);
      most[cls] = std::max(most[cls], all[k]->start_tag(jobs.at(*leads).tenant, cls));
    }
    for (std::size_t n = 0; n < starting.size(); ++n) {
      const Job& job = jobs.at(starting[n]);
      const auto cls = static_cast<std::size_t>(job.priority);
      found[n][k] = job.timed() || most[cls] == kNever || all[k]->start_tag(job.tenant, cls) <= most[cls];
      found[n][2] = !found[n][0];
    }
  }
  return found;
}

// The jobs of one start leave their line, or the gangs. `lead`: the one to which a turn was offered. Others of a batch
// take the next turns of this line, or with padding, where jobs ride along that are like it, their own. The virtual
// time becomes the start tag of the last one that is charged, as if they started one after the other, but nobody's who
// still waits: with that of the first one, a tenant with many jobs in a batch gets ahead of one with few without bound.
void State::start_jobs(std::span<const JobId> starting, PoolLine* line, JobId lead) {
  if (!has_tenants && line != nullptr) {
    for (const JobId id : starting) {
      Job& job = jobs.at(id);
      take_out(*line, job);
      job.phase = Job::Phase::runs;
    }
    return hold(jobs.at(starting.front()), -std::ssize(starting));
  }
  const std::array<FairTags*, 3> all = tags_of(jobs.at(starting.front()));
  std::array<std::array<double, kClasses>, 3> first;
  std::array<std::array<double, kClasses>, 3> last = {};
  for (auto& one : first) one.fill(kNever);
  std::vector<std::array<bool, 3>> charged;
  if (has_tenants) charged = charged_in(starting, line, lead);
  for (std::size_t n = 0; n < starting.size(); ++n) {
    const JobId id = starting[n];
    Job& job = jobs.at(id);
    if (has_tenants) {
      if (has_quota(job)) use_need(job.need, last_now);
      arrive(job);
      const auto cls = static_cast<std::size_t>(job.priority);
      const KeyEntry* place = nullptr;
      if (line != nullptr && !job.timed() && lead != JobId{}) {
        if (id == lead && line->lead == cls) {
          place = &line->lead_place;
        } else if (!line->padded) {
          place = &line->places[cls].front();
        }
      }
      const double owes = owed(job) / tenants[job.tenant].spec.weight;
      for (std::size_t k = 0; k < all.size(); ++k) {
        if (!charged[n][k]) continue;
        const double tag = charge(job, owes, *all[k]);
        first[k][cls] = std::min(first[k][cls], tag);
        if (tag < kNever) last[k][cls] = std::max(last[k][cls], tag);
      }
      if (owes > 0.0) turn_of(id).charged = charged[n];
      take_turn(job, line, place);
    }
    hold(job, -1);
    if (line != nullptr) {
      take_out(*line, job);
    } else {
      gangs.erase({job.background, job.key, id});
      if (has_tenants) leave(job, nullptr);
    }
    job.phase = Job::Phase::runs;
  }
  for (std::size_t k = 0; has_tenants && k < all.size(); ++k) {
    for (std::size_t cls = 0; cls < kClasses; ++cls) {
      double time = first[k][cls];
      if (time == kNever) continue;
      const double elsewhere = line == nullptr ? 0.0 : k < 2 ? line->elsewhere[k][cls] : kNever;
      if (time < last[k][cls]) {
        const double here = line->padded ? all[k]->least_tag(starters(*line, cls), cls) : kNever;
        time = std::max(time, std::min({last[k][cls], elsewhere, here}));
      }
      if (k == 0 && time > elsewhere) pass_over(*all[k], cls, time);
      all[k]->virtual_time[cls] = std::max(all[k]->virtual_time[cls], time);
    }
  }
}

// A job was taken back before it began.
void State::refund(const Job& job) {
  const std::array<bool, 3> charged = std::exchange(turn_of(job.id).charged, {});
  const double paid = job.charge / tenants[job.tenant].spec.weight;
  const std::array<FairTags*, 3> all = tags_of(job);
  for (std::size_t k = 0; k < all.size(); ++k) {
    if (!charged[k]) continue;
    FairTags::Tag& of = all[k]->tags[job.tenant][static_cast<std::size_t>(job.priority)];
    const double from_debt = job.timed() ? std::min(paid, of.debt) : 0.0;
    of.debt -= from_debt;
    of.start -= paid - from_debt;
  }
}

// Where what is next waits, in the order in which it is offered to devices. The first turns of each priority, one for
// each line and gang, are offered to these in the order of their tenants' tags.
void State::fair_heads(double now) {
  struct Candidate {
    std::size_t set;  // of its need
    double tag;
    KeyEntry first;  // of its jobs
    std::size_t line;
    std::pair<double, KeyEntry> order = {};
    auto operator<=>(const Candidate&) const = default;
  };
  struct Head {
    bool background;
    KeyEntry turn;
    KeyEntry first;
    std::size_t line;
    std::size_t queue;
    auto operator<=>(const Head&) const = default;
  };
  if (quotas) hold_back(now);
  std::array<std::vector<Candidate>, kClasses> candidates;
  std::array<std::vector<KeyEntry>, kClasses> turns_of;
  std::vector<Head> all;
  for (const std::size_t at : active_lines) {
    PoolLine& line = lines[at];
    for (auto& least : line.elsewhere) least.fill(kNever);
    all.push_back({line.background, {kNever, line.front()->id}, {}, at, kTimed});  // if nobody may start, it shows why
    std::array<Candidate, kClasses> best;
    const std::size_t set = sets[line.need];
    best.fill({set, kNever, {}, kNone});
    for (const auto& [tenant, queues] : line.tenants) {
      for (std::size_t q = 0; q <= kTimed; ++q) {
        if (queues[q].empty() || !may_start(tenant, queues[q].front(), line.kind, 1, 1)) continue;
        const KeyEntry& first = queues[q].front();
        if (q == kTimed) {
          all.push_back({line.background, first, first, at, q});
        } else {
          best[q] = std::min(best[q], {set, fair[1 + set].start_tag(tenant, q), first, at});
        }
      }
    }
    for (std::size_t cls = 0; cls < kClasses; ++cls) {
      if (best[cls].line == kNone) continue;
      candidates[cls].push_back(best[cls]);
      turns_of[cls].push_back(line.places[cls].front());
    }
  }
  for (const JobId id : first_gangs()) {
    const Job& job = jobs.at(id);
    const KeyEntry own{job.key, id};
    if (!may_start(job.tenant, own, job.kind, job.gang, 1)) continue;
    if (job.timed()) {
      all.push_back({job.background, own, own, kNone, kTimed});
    } else {
      const std::size_t set = sets[job.need];
      candidates[queue_of(job)].push_back({set, fair[1 + set].start_tag(job.tenant, queue_of(job)), own, kNone});
      turns_of[queue_of(job)].push_back({turn_of(id).place, id});
    }
  }
  for (std::size_t cls = 0; cls < kClasses; ++cls) {
    // Those of each set in the order of its queue, and the sets by that of all.
    std::ranges::sort(candidates[cls]);
    const auto elsewhere = [&](auto those, std::size_t k, const auto& tag) {  // the least first
      for (auto one = those.begin(); those.size() > 1 && one != those.end(); ++one) {
        if (one->line != kNone) lines[one->line].elsewhere[k][cls] = tag(one == those.begin() ? those[1] : those[0]);
      }
    };
    for (auto one = candidates[cls].begin(); one != candidates[cls].end();) {
      const auto begin = one;
      std::pair<double, KeyEntry> before = {};
      for (; one != candidates[cls].end() && one->set == begin->set; ++one)
        before = one->order = std::max(before, {fair[0].start_tag(jobs.at(one->first.id).tenant, cls), one->first});
      elsewhere(std::span(begin, one), 0, [](const Candidate& of) { return of.tag; });
    }
    std::ranges::stable_sort(candidates[cls], {}, &Candidate::order);
    elsewhere(std::span(candidates[cls]), 1, [](const Candidate& of) { return of.order.first; });
    std::ranges::sort(turns_of[cls]);
    for (std::size_t k = 0; k < candidates[cls].size(); ++k) {
      const bool background = cls == static_cast<std::size_t>(Priority::background);
      all.push_back({background, turns_of[cls][k], candidates[cls][k].first, candidates[cls][k].line, cls});
    }
  }
  std::ranges::sort(all);
  std::size_t asked = 0;
  std::set<std::size_t> seen;
  for (const Head& head : all) {
    if (head.line == kNone ? asked++ >= kGangsAsked : !seen.insert(head.line).second) continue;
    heads.emplace_back(head.background, head.turn.key, head.first.id, head.line);
    if (head.line == kNone) continue;
    lines[head.line].lead = head.queue;
    lines[head.line].lead_place = head.turn;
  }
}

std::size_t PoolState::add_tenant(PoolTenant tenant) {
  State& s = *state_;
  require(std::isfinite(tenant.weight) && tenant.weight > 0.0,
          "the weight of tenant '{}' is {}; it must be positive and finite", tenant.name, tenant.weight);
  require(tenant.devices >= 1, "tenant '{}' may use {} devices; it must be at least one", tenant.name, tenant.devices);
  require(tenant.memory_bytes > 0.0, "tenant '{}' may use {} bytes; it must be positive", tenant.name,
          tenant.memory_bytes);
  require(s.tenants.size() < std::numeric_limits<std::uint32_t>::max(), "there are too many tenants");
  s.quotas = s.quotas || limited(tenant);
  s.tenants.push_back({.spec = std::move(tenant)});
  s.share();
  for (FairTags& tags : s.fair) {
    if (!tags.tags.empty()) tags.tags.emplace_back();
  }
  for (PoolLine& line : s.lines) line.fills.tags.emplace_back();
  if (s.ledger != nullptr) s.ledger->add_tenant(s.tenants.back().spec);
  return s.tenants.size() - 1;
}

std::vector<PoolTenantUse> PoolState::tenants() const {
  state_->count_use();
  std::vector<PoolTenantUse> all;
  for (const Tenant& one : state_->tenants) all.push_back({one.spec, one.served, one.waiting, one.devices, one.bytes});
  return all;
}

}  // namespace paceline::plan
