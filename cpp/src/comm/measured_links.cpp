// SPDX-License-Identifier: Apache-2.0
#include "comm/measured_links.hpp"

#include <algorithm>
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <paceline/error.hpp>

#include "comm/memory_spaces.hpp"

namespace paceline {

bool relays_pay(std::size_t others, double spread_bytes_per_second, double exchange_bytes_per_second) noexcept {
  if (spread_bytes_per_second <= 0.0 || exchange_bytes_per_second <= 0.0) return true;
  const double direct = static_cast<double>(others) / spread_bytes_per_second;  // seconds for each byte
  const double relayed = 1.0 / std::min(spread_bytes_per_second, exchange_bytes_per_second);
  return relayed < 0.95 * direct;  // what gains less than that is noise, and relays wait more often
}

// A tenth is more than what differs between two measurements, and than what the waits of a push cost on copies of some
// MiB.
bool pushes_pay(double pull_bytes_per_second, double push_bytes_per_second) noexcept {
  return pull_bytes_per_second > 0.0 && push_bytes_per_second > 1.1 * pull_bytes_per_second;
}

GpuLinks measure_links(const DeviceGroup& group) {
  const internal::MemorySpaces memory(group);
  return internal::known_links(memory.endpoints());
}

}  // namespace paceline

namespace paceline::internal {
namespace {

constexpr std::size_t kBytes = std::size_t{32} << 20;  // takes a millisecond on NVLink, so that starting it is little
constexpr int kRepetitions = 2;                        // the first one may connect, pin or wake something

struct Pull {
  std::size_t from = 0;
  std::size_t to = 0;
};

std::vector<Pull> all_pulls(std::size_t count) {
  std::vector<Pull> pulls;
  for (std::size_t from = 0; from < count; ++from) {
    for (std::size_t to = 0; to < count; ++to) {
      if (from != to) pulls.push_back({from, to});
    }
  }
  return pulls;
}

LinkKind kind_of(std::span<const Endpoint> endpoints, const Pull& pull) {
  return endpoints[pull.from].opened->link_to(*endpoints[pull.to].opened);
}

/// Times copies between GPUs. Everything is ordered on the endpoints' streams.
class Meter {
 public:
  Meter(std::span<const Endpoint> endpoints, std::chrono::nanoseconds budget)
      : deadline_(std::chrono::steady_clock::now() + budget) {
    for (const Endpoint& endpoint : endpoints) {
      AsyncDevice& device = *endpoint.opened;
      Gpu& gpu = gpus_.emplace_back();
      gpu.stream = endpoint.stream;
      gpu.given = device.allocate(kBytes, *gpu.stream);
      gpu.taken = device.allocate(kBytes, *gpu.stream);
      gpu.ready = device.make_event(false);
      gpu.start = device.make_event(true);
      gpu.end = device.make_event(true);
      gpu.stream->zero(gpu.given->data(), kBytes);
      gpu.stream->record(*gpu.ready);
    }
    for (const Gpu& gpu : gpus_) {
      for (const Gpu& other : gpus_) gpu.stream->wait(*other.ready);
    }
  }

  /// The bytes per second of the slowest of these pulls, which go at once. No two of them have one target. `push`: the
  /// source copies; then no two of them have one source.
  /// @throws Timeout if the time is over
  [[nodiscard]] double slowest(std::span<const Pull> pulls, bool push = false) {
    const auto copier = [&](const Pull& pull) -> Gpu& { return gpus_[push ? pull.from : pull.to]; };
    std::vector<double> best(pulls.size(), 0.0);
    for (int repetition = 0; repetition < kRepetitions; ++repetition) {
      if (std::chrono::steady_clock::now() >= deadline_) throw Timeout("measuring links: no time is left");
      Gpu& first = copier(pulls.front());
      first.stream->record(*first.ready);
      for (const Pull& pull : pulls) copier(pull).stream->wait(*first.ready);
      for (const Pull& pull : pulls) {
        Gpu& by = copier(pull);
        by.stream->record(*by.start);
        by.stream->copy(gpus_[pull.to].taken->data(), gpus_[pull.from].given->data(), kBytes);
        by.stream->record(*by.end);
      }
      for (const Pull& pull : pulls) {  // before the memory returns, or is written again
        gpus_[push ? pull.to : pull.from].stream->wait(*copier(pull).end);
      }
      for (std::size_t k = 0; k < pulls.size(); ++k) {
        const Gpu& by = copier(pulls[k]);
        wait_for(*by.end, deadline_ - std::chrono::steady_clock::now());
        if (const double seconds = by.end->seconds_since(*by.start); seconds > 0.0) {
          best[k] = std::max(best[k], static_cast<double>(kBytes) / seconds);
        }
      }
    }
    return *std::ranges::min_element(best);
  }

 private:
  struct Gpu {
    std::shared_ptr<Stream> stream;
    std::unique_ptr<Buffer> given;
    std::unique_ptr<Buffer> taken;
    std::unique_ptr<Event> ready;
    std::unique_ptr<Event> start;
    std::unique_ptr<Event> end;
  };

  std::chrono::steady_clock::time_point deadline_;
  std::vector<Gpu> gpus_;
};

/// Gives unused memory back, which would count as used. A GPU that is busy keeps it until somebody else does this.
void release_memory(std::span<const Endpoint> endpoints, std::chrono::nanoseconds patience) {
  const auto deadline = std::chrono::steady_clock::now() + patience;
  for (const Endpoint& endpoint : endpoints) {
    try {
      const std::unique_ptr<Event> returned = endpoint.opened->make_event(false);
      endpoint.stream->record(*returned);
      wait_for(*returned, deadline - std::chrono::steady_clock::now());
      endpoint.opened->release_memory();
    } catch (const Error&) {
    }
  }
}

/// Everyone from the first GPU at once, and a ring of the others, where there are others.
void measure_all_at_once(Meter& meter, std::size_t gpus, GpuLinks& links) {
  const std::size_t others = gpus - 1;
  if (others < 2) return;
  std::vector<Pull> spread, exchange;
  for (std::size_t k = 0; k < others; ++k) {
    spread.push_back({0, k + 1});
    exchange.push_back({k + 1, (k + 1) % others + 1});
  }
  const double from_first = static_cast<double>(others) * meter.slowest(spread);
  links.exchange_bytes_per_second = meter.slowest(exchange);
  links.spread_bytes_per_second = from_first;
}

/// Who makes the copies of each ordered pair in this process. While this object lives, the stream that is asked to: so
/// pulls can be measured. Then whoever was measured to be faster; where that is unknown, who did it before.
class Pushers {
 public:
  Pushers(std::span<const Endpoint> endpoints, std::span<const Pull> pulls) : endpoints_(endpoints), pulls_(pulls) {
    for (const Pull& pull : pulls_) before_.push_back(set(pull, false));
  }
  ~Pushers() {
    for (std::size_t k = 0; !chosen_ && k < pulls_.size(); ++k) set(pulls_[k], before_[k]);
  }
  Pushers(const Pushers&) = delete;
  Pushers& operator=(const Pushers&) = delete;

  /// Says in the links what was chosen. True if anything is pushed.
  bool choose(GpuLinks& links) {
    chosen_ = true;
    for (std::size_t k = 0; k < pulls_.size(); ++k) {
      GpuLink& link = links.pairs[k];
      link.pushed = link.push_bytes_per_second > 0.0
                        ? pushes_pay(link.bytes_per_second, link.push_bytes_per_second)
                        : before_[k] && link.kind != LinkKind::through_host && link.kind != LinkKind::wrong_peer;
      set(pulls_[k], link.pushed);
    }
    return std::ranges::any_of(links.pairs, &GpuLink::pushed);
  }

 private:
  bool set(const Pull& pull, bool on) const {
    return endpoints_[pull.from].opened->push_to(*endpoints_[pull.to].opened, on);
  }

  std::span<const Endpoint> endpoints_;
  std::span<const Pull> pulls_;
  std::vector<bool> before_;
  bool chosen_ = false;  // otherwise an exception goes through here
};

bool is_complete(const GpuLinks& links) {
  const bool has_all =
      std::ranges::all_of(links.pairs, [](const GpuLink& link) { return link.bytes_per_second > 0.0; });
  return has_all && (links.pairs.size() <= 2 || links.exchange_bytes_per_second > 0.0);
}

}  // namespace

GpuLinks measure_links(std::span<const Endpoint> endpoints, std::chrono::nanoseconds budget,
                       std::chrono::nanoseconds patience) {
  GpuLinks links;
  const std::vector<Pull> pulls = all_pulls(endpoints.size());
  for (const auto& [from, to] : pulls) {
    links.pairs.push_back({endpoints[from].device.name, endpoints[to].device.name, kind_of(endpoints, {from, to})});
  }
  if (pulls.empty()) return links;
  Pushers pushers(endpoints, pulls);
  try {
    Meter meter(endpoints, budget);
    measure_all_at_once(meter, endpoints.size(), links);  // first what decides
    for (std::size_t k = 0; k < pulls.size(); ++k) links.pairs[k].bytes_per_second = meter.slowest({&pulls[k], 1});
    for (std::size_t k = 0; k < pulls.size(); ++k) {
      const LinkKind kind = links.pairs[k].kind;
      if (kind != LinkKind::nvlink && kind != LinkKind::pcie_peer) continue;  // through the host it is the same
      links.pairs[k].push_bytes_per_second = meter.slowest({&pulls[k], 1}, true);
    }
    if (pushers.choose(links)) measure_all_at_once(meter, endpoints.size(), links);
  } catch (const Error&) {  // no memory, no time, or a lost GPU, which says so in its own calls
    static_cast<void>(pushers.choose(links));
  }
  release_memory(endpoints, patience);
  return links;
}

GpuLinks known_links(std::span<const Endpoint> endpoints, std::chrono::nanoseconds budget) {
  static std::mutex mutex;
  static auto* const known = new std::map<std::vector<std::string>, GpuLinks>;  // never destroyed: any thread may ask
  std::vector<std::string> names;
  for (const Endpoint& endpoint : endpoints) names.push_back(endpoint.device.name);
  const std::lock_guard lock(mutex);
  if (const auto found = known->find(names); found != known->end()) {
    // GPUs that were opened again were also checked again.
    const std::vector<Pull> pulls = all_pulls(endpoints.size());
    for (std::size_t k = 0; k < pulls.size(); ++k) found->second.pairs[k].kind = kind_of(endpoints, pulls[k]);
    static_cast<void>(Pushers(endpoints, pulls).choose(found->second));  // these forget, too
    return found->second;
  }
  GpuLinks links = measure_links(endpoints, budget);
  if (is_complete(links)) known->emplace(std::move(names), links);
  return links;
}

}  // namespace paceline::internal
