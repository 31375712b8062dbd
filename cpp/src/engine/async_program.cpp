// SPDX-License-Identifier: Apache-2.0
//
// The step on devices that work after the call. What must come after what, and by which wait:
//
//   1. A device's first work of a step after the parameters are ready: its stream waits for `ready` (recorded on the
//   home
//      stream at begin_step), or for its memory space's copy, whose stream waited for `ready`.
//   2. The reduction after every device's last micro-batch: the stream that sums a space waits for the last `end` of
//   each
//      lane, and the home stream for each space's `summed`.
//   3. What the caller enqueues after step() after the reduction: both are on the home stream.
//   4. The next step's first writes to gradients after this reduction has read them: they wait for `ready`, which comes
//      after the reduction on the home stream.
//   5. The update of the parameters, which follows the reduction, after every copy of them: the home stream waits for
//   each
//      space's `arrived`, also where no device of that space had work.
//   6. The caller's memory is free again when step() returns or throws: complete() waits for `reduced`, abandon() for
//      everything.
#include <algorithm>
#include <cstddef>
#include <cstring>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <paceline/engine/block_reduction.hpp>
#include <paceline/runtime/async.hpp>
#include <paceline/runtime/backend.hpp>

#include "engine/trainer_program.hpp"

namespace paceline {
namespace {

/// A micro-batch on its way: recorded before and after it.
struct Span {
  std::unique_ptr<Event> start;
  std::unique_ptr<Event> end;
};

/// One device. Those of the host have no stream: what their worker has done is done.
struct Lane {
  std::size_t space = 0;
  std::unique_ptr<AsyncDevice> device;
  std::unique_ptr<Stream> stream;
  std::unique_ptr<Buffer> gradients;
  std::unique_ptr<Buffer> loss;
  std::vector<Span> spans;  // of this step the first `used`; events are made once
  std::size_t used = 0;
  bool ran = false;
  bool warm = false;
};

/// Devices that share memory, and what they share.
struct Space {
  std::size_t lead = 0;            // its first lane
  std::unique_ptr<Stream> copies;  // brings the parameters; null at home
  std::unique_ptr<Buffer> parameters;
  std::unique_ptr<Event> arrived;  // the parameters
  std::unique_ptr<Buffer> sum;     // of its lanes' gradients; null at home and on the host
  std::unique_ptr<Buffer> loss;
  std::unique_ptr<Event> summed;
  std::unique_ptr<Buffer> landed_gradients;  // at home
  std::unique_ptr<Buffer> landed_losses;
};

template <class T>
T* as(const std::unique_ptr<Buffer>& buffer) {
  return static_cast<T*>(buffer->data());
}

template <class T>
class AsyncProgram final : public TrainerProgram<T> {
 public:
  using Body = typename TrainerProgram<T>::Body;

  AsyncProgram(const DeviceGroup& group, const DataParallelOptions& options)
      : count_(options.parameter_count),
        run_ahead_(static_cast<std::size_t>(std::max<std::int64_t>(options.run_ahead, 0))) {
    find_spaces(group);
    home_stream_ = options.stream != nullptr ? home().adopt_stream(options.stream) : home().make_stream();
    ready_ = home().make_event(false);
    reduced_ = home().make_event(false);
    parameters_ = home().allocate(bytes(), *home_stream_);
    committed_ = home().allocate(bytes(), *home_stream_);
    scratch_ = home().allocate(bytes(), *home_stream_);
    loss_ = home().allocate(sizeof(double), *home_stream_);
    objective_ = home().allocate_pinned(sizeof(double));
    home_stream_->zero(parameters_->data(), bytes());
    home_stream_->zero(committed_->data(), bytes());
    for (Lane& lane : lanes_) open(lane);
    for (std::size_t s = 0; s < spaces_.size(); ++s) {
      if (s != home_) open(spaces_[s]);
    }
  }

  ~AsyncProgram() override {
    abandon();
    // Pinned memory first, while nothing runs: giving it back waits for all that does, be it the release of the rest.
    objective_.reset();
    for (Lane& lane : lanes_) {
      if (lane.device != nullptr) continue;
      lane.gradients.reset();
      lane.loss.reset();
    }
    for (Space& space : spaces_) {
      if (on_host(space)) space.parameters.reset();
    }
  }

  void begin_step(const Body& body, double total_weight) override {
    body_ = &body;
    total_weight_ = total_weight;
    home_stream_->record(*ready_);
    for (Space& space : spaces_) {
      if (space.copies == nullptr) continue;
      space.copies->wait(*ready_);
      space.copies->copy(space.parameters->data(), parameters_->data(), bytes());
      space.copies->record(*space.arrived);
    }
    for (Lane& lane : lanes_) {
      lane.used = 0;
      lane.ran = false;
    }
  }

  bool run(const MicroBatch& micro_batch) override {
    Lane& lane = lanes_[micro_batch.device_index];
    const bool cold = !std::exchange(lane.warm, true);
    if (lane.stream == nullptr) {
      run_on_host(lane, micro_batch);
      return cold;
    }
    Stream& stream = *lane.stream;
    if (!std::exchange(lane.ran, true)) {
      stream.wait(arrival(lane));
      stream.zero(lane.gradients->data(), bytes());
      stream.zero(lane.loss->data(), sizeof(double));
    }
    if (lane.used > run_ahead_) wait_for(*lane.spans[lane.used - 1 - run_ahead_].end);
    // A device that has nothing to do when it is given more has waited for the host: that time is not its own.
    const bool idle = lane.used > 0 && lane.spans[lane.used - 1].end->done();
    if (lane.used == lane.spans.size()) {
      lane.spans.push_back({lane.device->make_event(true), lane.device->make_event(true)});
    }
    Span& span = lane.spans[lane.used++];
    stream.record(*span.start);
    BasicReplica<T> replica = replica_of(lane, micro_batch.device_index);
    replica.stream = stream.native();
    replica.loss_sum = as<double>(lane.loss);
    (*body_)(micro_batch, replica);
    stream.record(*span.end);
    return cold || idle;
  }

  std::unique_ptr<BlockReduction> reduction() override {
    std::vector<const void*> gradients;
    std::vector<const void*> losses;
    for (std::size_t s = 0; s < spaces_.size(); ++s) {
      if (s != home_) bring_home(spaces_[s], s, gradients, losses);
    }
    for (Lane& lane : lanes_) {
      if (!lane.ran || lane.space != home_) continue;
      home_stream_->wait(*lane.spans[lane.used - 1].end);
      gradients.push_back(lane.gradients->data());
      losses.push_back(lane.loss->data());
    }
    home_stream_->sum({gradients, scratch_->data(), count_, kDTypeOf<T>, 1.0 / total_weight_});
    home_stream_->sum({losses, loss_->data(), 1, DType::float64, 1.0 / total_weight_});
    home_stream_->copy(objective_->data(), loss_->data(), sizeof(double));
    home_stream_->record(*reduced_);
    return nullptr;
  }

  double complete() override {
    wait_for(*reduced_);
    std::swap(committed_, scratch_);
    return *as<double>(objective_);
  }

  void abandon() noexcept override {
    for (Lane& lane : lanes_) drain(lane.device.get(), lane.stream.get());
    for (Space& space : spaces_) drain(&device_of(space), space.copies.get());
    drain(&home(), home_stream_.get());
  }

  void stamp(std::vector<ClaimRecord>& claims) const override {
    std::vector<std::size_t> next(lanes_.size(), 0);
    std::vector<double> origin(lanes_.size(), 0.0);
    for (ClaimRecord& claim : claims) {
      const std::size_t d = claim.micro_batch.device_index;
      const Lane& lane = lanes_[d];
      if (lane.stream == nullptr) continue;
      const std::size_t k = next[d]++;
      if (k == 0) origin[d] = claim.start_seconds;
      const double start = lane.spans[k].start->seconds_since(*lane.spans[0].start);
      claim.start_seconds = origin[d] + start;
      claim.finish_seconds = claim.start_seconds + lane.spans[k].end->seconds_since(*lane.spans[k].start);
    }
  }

  std::span<T> parameters() noexcept override { return {as<T>(parameters_), count_}; }
  std::span<T> gradients() noexcept override { return {as<T>(committed_), count_}; }
  [[nodiscard]] void* stream() const noexcept override { return home_stream_->native(); }

 private:
  [[nodiscard]] std::size_t bytes() const { return count_ * sizeof(T); }

  /// Home is the first GPU's memory: parameters and their update live there.
  void find_spaces(const DeviceGroup& group) {
    std::map<std::string, std::size_t> known;
    lanes_.resize(group.size());
    home_ = group.size();
    for (std::size_t d = 0; d < group.size(); ++d) {
      const Device& device = group.devices()[d];
      const auto [entry, is_new] = known.emplace(device.memory_space, spaces_.size());
      if (is_new) spaces_.emplace_back().lead = d;
      lanes_[d].space = entry->second;
      lanes_[d].device = backend_of(device).open(device);
      if (lanes_[d].device != nullptr && home_ == group.size()) home_ = entry->second;
    }
  }

  [[nodiscard]] AsyncDevice& home() const { return *lanes_[spaces_[home_].lead].device; }
  /// What makes the streams of a space: its own first device, or for the host home.
  [[nodiscard]] AsyncDevice& device_of(const Space& space) const {
    AsyncDevice* const own = lanes_[space.lead].device.get();
    return own != nullptr ? *own : home();
  }
  [[nodiscard]] bool on_host(const Space& space) const { return lanes_[space.lead].device == nullptr; }

  void open(Lane& lane) {
    if (lane.device == nullptr) {
      lane.gradients = home().allocate_pinned(bytes());
      lane.loss = home().allocate_pinned(sizeof(double));
      return;
    }
    lane.stream = lane.device->make_stream();
    lane.gradients = lane.device->allocate(bytes(), *lane.stream);
    lane.loss = lane.device->allocate(sizeof(double), *lane.stream);
  }

  void open(Space& space) {
    AsyncDevice& device = device_of(space);
    space.copies = device.make_stream();
    space.arrived = device.make_event(false);
    std::size_t parts = 1;  // that come home: one sum of a GPU's, every lane's of the host's
    if (on_host(space)) {
      space.parameters = device.allocate_pinned(bytes());
      const auto here = [&](const Lane& lane) { return &spaces_[lane.space] == &space; };
      parts = static_cast<std::size_t>(std::count_if(lanes_.begin(), lanes_.end(), here));
    } else {
      space.parameters = device.allocate(bytes(), *space.copies);
      space.sum = device.allocate(bytes(), *space.copies);
      space.loss = device.allocate(sizeof(double), *space.copies);
      space.summed = device.make_event(false);
    }
    space.landed_gradients = home().allocate(bytes() * parts, *home_stream_);
    space.landed_losses = home().allocate(sizeof(double) * parts, *home_stream_);
  }

  [[nodiscard]] const Event& arrival(const Lane& lane) const {
    return lane.space == home_ ? *ready_ : *spaces_[lane.space].arrived;
  }

  [[nodiscard]] BasicReplica<T> replica_of(const Lane& lane, std::size_t index) const {
    const std::unique_ptr<Buffer>& parameters = lane.space == home_ ? parameters_ : spaces_[lane.space].parameters;
    return {.device_index = index,
            .parameters = std::span<const T>(as<T>(parameters), count_),
            .gradients = std::span<T>(as<T>(lane.gradients), count_)};
  }

  void run_on_host(Lane& lane, const MicroBatch& micro_batch) {
    if (!std::exchange(lane.ran, true)) {
      wait_for(arrival(lane));
      std::memset(lane.gradients->data(), 0, bytes());
      *as<double>(lane.loss) = 0.0;
    }
    BasicReplica<T> replica = replica_of(lane, micro_batch.device_index);
    *as<double>(lane.loss) += (*body_)(micro_batch, replica);
  }

  void bring_home(Space& space, std::size_t index, std::vector<const void*>& gradients,
                  std::vector<const void*>& losses) {
    std::vector<const void*> lane_gradients;
    std::vector<const void*> lane_losses;
    for (Lane& lane : lanes_) {
      if (!lane.ran || lane.space != index) continue;
      lane_gradients.push_back(lane.gradients->data());
      lane_losses.push_back(lane.loss->data());
      if (lane.stream != nullptr) space.copies->wait(*lane.spans[lane.used - 1].end);
    }
    home_stream_->wait(*space.arrived);
    if (lane_gradients.empty()) return;
    if (space.sum != nullptr) {
      space.copies->sum({lane_gradients, space.sum->data(), count_, kDTypeOf<T>, 1.0});
      space.copies->sum({lane_losses, space.loss->data(), 1, DType::float64, 1.0});
      space.copies->record(*space.summed);
      home_stream_->wait(*space.summed);
      lane_gradients = {space.sum->data()};
      lane_losses = {space.loss->data()};
    }
    for (std::size_t k = 0; k < lane_gradients.size(); ++k) {
      T* const gradient = as<T>(space.landed_gradients) + k * count_;
      double* const loss = as<double>(space.landed_losses) + k;
      home_stream_->copy(gradient, lane_gradients[k], bytes());
      home_stream_->copy(loss, lane_losses[k], sizeof(double));
      gradients.push_back(gradient);
      losses.push_back(loss);
    }
  }

  /// Waits until the stream has nothing left. A device that fails here has nothing left either.
  static void drain(AsyncDevice* device, Stream* stream) noexcept {
    if (device == nullptr || stream == nullptr) return;
    try {
      const std::unique_ptr<Event> event = device->make_event(false);
      stream->record(*event);
      wait_for(*event);
    } catch (...) {
    }
  }

  std::size_t count_;
  std::size_t run_ahead_;
  std::size_t home_ = 0;
  std::unique_ptr<Stream> home_stream_;
  std::vector<Lane> lanes_;
  std::vector<Space> spaces_;
  std::unique_ptr<Event> ready_;
  std::unique_ptr<Event> reduced_;
  std::unique_ptr<Buffer> parameters_;
  std::unique_ptr<Buffer> committed_;
  std::unique_ptr<Buffer> scratch_;
  std::unique_ptr<Buffer> loss_;
  std::unique_ptr<Buffer> objective_;
  const Body* body_ = nullptr;
  double total_weight_ = 1.0;
};

}  // namespace

template <class T>
std::shared_ptr<TrainerProgram<T>> make_async_program(const DeviceGroup& group, const DataParallelOptions& options) {
  return std::make_shared<AsyncProgram<T>>(group, options);
}

template std::shared_ptr<TrainerProgram<float>> make_async_program(const DeviceGroup&, const DataParallelOptions&);
template std::shared_ptr<TrainerProgram<double>> make_async_program(const DeviceGroup&, const DataParallelOptions&);

}  // namespace paceline
