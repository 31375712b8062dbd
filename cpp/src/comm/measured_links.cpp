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

  /// The bytes per second of the slowest of these pulls, which go at once. No two of them have one target.
  /// @throws Timeout if the time is over
  [[nodiscard]] double slowest(std::span<const Pull> pulls) {
    std::vector<double> best(pulls.size(), 0.0);
    for (int repetition = 0; repetition < kRepetitions; ++repetition) {
      if (std::chrono::steady_clock::now() >= deadline_) throw Timeout("measuring links: no time is left");
      Gpu& first = gpus_[pulls.front().to];
      first.stream->record(*first.ready);
      for (const Pull& pull : pulls) gpus_[pull.to].stream->wait(*first.ready);
      for (const Pull& pull : pulls) {
        Gpu& to = gpus_[pull.to];
        to.stream->record(*to.start);
        to.stream->copy(to.taken->data(), gpus_[pull.from].given->data(), kBytes);
        to.stream->record(*to.end);
      }
      for (const Pull& pull : pulls) gpus_[pull.from].stream->wait(*gpus_[pull.to].end);  // before the memory returns
      for (std::size_t k = 0; k < pulls.size(); ++k) {
        const Gpu& to = gpus_[pulls[k].to];
        wait_for(*to.end, deadline_ - std::chrono::steady_clock::now());
        if (const double seconds = to.end->seconds_since(*to.start); seconds > 0.0) {
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

bool is_complete(const GpuLinks& links) {
  const bool has_all =
      std::ranges::all_of(links.pairs, [](const GpuLink& link) { return link.bytes_per_second > 0.0; });
  return has_all && (links.pairs.size() <= 2 || links.exchange_bytes_per_second > 0.0);
}

}  // namespace

GpuLinks measure_links(std::span<const Endpoint> endpoints, std::chrono::nanoseconds budget,
                       std::chrono::nanoseconds patience) {
  GpuLinks links;
  std::vector<Pull> pulls;
  for (std::size_t from = 0; from < endpoints.size(); ++from) {
    for (std::size_t to = 0; to < endpoints.size(); ++to) {
      if (from == to) continue;
      pulls.push_back({from, to});
      links.pairs.push_back({endpoints[from].device.name, endpoints[to].device.name,
                             endpoints[from].opened->link_to(*endpoints[to].opened)});
    }
  }
  if (pulls.empty()) return links;
  try {
    Meter meter(endpoints, budget);
    // First what decides: everyone from the first GPU, and a ring of the others.
    if (const std::size_t others = endpoints.size() - 1; others > 1) {
      std::vector<Pull> spread, exchange;
      for (std::size_t k = 0; k < others; ++k) {
        spread.push_back({0, k + 1});
        exchange.push_back({k + 1, (k + 1) % others + 1});
      }
      links.spread_bytes_per_second = static_cast<double>(others) * meter.slowest(spread);
      links.exchange_bytes_per_second = meter.slowest(exchange);
    }
    for (std::size_t k = 0; k < pulls.size(); ++k) links.pairs[k].bytes_per_second = meter.slowest({&pulls[k], 1});
  } catch (const Error&) {  // no memory, no time, or a lost GPU, which says so in its own calls
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
  if (const auto found = known->find(names); found != known->end()) return found->second;
  GpuLinks links = measure_links(endpoints, budget);
  if (is_complete(links)) known->emplace(std::move(names), links);
  return links;
}

}  // namespace paceline::internal
