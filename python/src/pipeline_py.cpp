// SPDX-License-Identifier: Apache-2.0
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <paceline/engine/lanes.hpp>
#include <paceline/engine/pipeline_step.hpp>
#include <paceline/plan/pipeline_time.hpp>
#include <paceline/plan/schedule.hpp>
#include <paceline/plan/stages.hpp>
#include <paceline/runtime/blocking.hpp>

#include "action_records.hpp"
#include "bindings.hpp"
#include "interruptible.hpp"
#include "python_program.hpp"
#include "worker_gil.hpp"

namespace py = pybind11;

namespace paceline::python {

using namespace py::literals;
namespace {

/// (stage, "F" or "B", micro-batch)
using TurnTuple = std::tuple<std::size_t, char, std::int64_t>;

TurnTuple tuple_of(const StageAction& action) { return {action.stage, letter_of(action.kind), action.micro_batch}; }

/// A step whose end is that of its lanes, too.
struct LaneStep {
  PipelineStep step;
  std::shared_ptr<Lanes> lanes;
  double started = 0.0;  // by the clock of time.perf_counter()

  void start() {
    started = std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
    step.start();
  }
  bool wait(const DeviceGroup::Between& between) { return step.wait(between) && lanes->wait(between); }
  void cancel() { step.cancel(); }
};

/// Carries micro-batches by a Python callable: body(lane, micro_batch) -> int, negative if it has failed. The callable
/// keeps the exception.
class PythonLanes {
 public:
  PythonLanes(LaneThreads& threads, const plan::Schedule& schedule, py::object body) : body_(shared(std::move(body))) {
    lanes_ = std::make_shared<Lanes>(threads, schedule, [body = body_](std::size_t lane, std::int64_t micro_batch) {
      with_interpreter([&] {
        PyObject* const result = call_body(*body, {static_cast<std::int64_t>(lane), micro_batch});
        const long code = PyLong_AsLong(result);
        Py_DECREF(result);
        if (code < 0) throw BodyFailed();
      });
    });
  }

  [[nodiscard]] const std::shared_ptr<Lanes>& lanes() const noexcept { return lanes_; }
  /// Call it with the GIL held, when no lane runs the callable any more.
  void release() { *body_ = py::object(); }
  void begin(const std::shared_ptr<LaneStep>& step) { step_ = step; }
  void cancel() const {
    if (const auto step = step_.lock()) step->cancel();
  }

 private:
  std::shared_ptr<py::object> body_;  // shared with the lanes, which a second Ctrl-C leaves behind
  std::shared_ptr<Lanes> lanes_;
  std::weak_ptr<LaneStep> step_;  // under the GIL
};

std::shared_ptr<LaneStep> run_lanes(const DeviceGroup& group, const std::shared_ptr<PythonLanes>& lanes,
                                    const std::string& schedule, std::vector<DeviceId> devices) {
  std::shared_ptr<LaneStep> step(new LaneStep{
      PipelineStep(group, lanes->lanes(), plan::schedule_of(schedule), std::move(devices)), lanes->lanes()});
  lanes->begin(step);
  run_interruptibly(*step, [&] { lanes->release(); });
  lanes->release();
  if (const PipelineFailure* failure = step->step.failure()) {
    try {
      std::rethrow_exception(failure->error);
    } catch (const BodyFailed&) {  // the Python side has the exception and raises it itself
    } catch (...) {
      step->step.rethrow_failure();
    }
  }
  return step;
}

}  // namespace

void bind_pipeline(py::module_& module) {
  py::class_<LaneThreads, std::shared_ptr<LaneThreads>>(module, "LaneThreads",
                                                        "Threads that carry micro-batches through a pipeline.")
      .def(py::init([] {
        // Without the GIL, which the threads need to end.
        return std::shared_ptr<LaneThreads>(new LaneThreads(), [](LaneThreads* threads) {
          const BlockingRegion release;
          delete threads;
        });
      }))
      .def_property_readonly("size", &LaneThreads::size, "How many threads there are.")
      .def("close", &LaneThreads::close, py::call_guard<BlockingRegion>(), "End the threads.");

  py::class_<PythonLanes, std::shared_ptr<PythonLanes>>(
      module, "Lanes", "The lanes of one step: body(lane, micro_batch) -> int carries a micro-batch; negative: failed.")
      .def(py::init([](LaneThreads& threads, const std::string& schedule, py::object body) {
             return std::make_shared<PythonLanes>(threads, plan::schedule_of(schedule), std::move(body));
           }),
           "threads"_a, "schedule"_a, "body"_a)
      .def(
          "advance",
          [](const PythonLanes& lanes, std::int64_t micro_batch) -> std::optional<TurnTuple> {
            const std::shared_ptr<Lanes> kept = lanes.lanes();
            const auto next = [&] {
              const BlockingRegion release;
              return kept->advance(micro_batch);
            }();
            if (!next) return std::nullopt;
            return tuple_of(*next);
          },
          "micro_batch"_a,
          "Give the turn back, and wait for that of the next action: (stage, 'F' or 'B', micro-batch). None: give up.")
      .def(
          "current",
          [](const PythonLanes& lanes, std::int64_t micro_batch) -> std::optional<TurnTuple> {
            const auto now = lanes.lanes()->current(micro_batch);
            if (!now) return std::nullopt;
            return tuple_of(*now);
          },
          "micro_batch"_a, "The action whose turn the micro-batch has.")
      .def_property_readonly(
          "count", [](const PythonLanes& lanes) { return lanes.lanes()->lanes(); }, "How many lanes.")
      .def("cancel", &PythonLanes::cancel, "End the step that runs once every lane has left its action. Any thread.");

  py::class_<LaneStep, std::shared_ptr<LaneStep>>(module, "PipelineOutcome", "How one step of a pipeline ended.")
      .def_property_readonly(
          "failed", [](const LaneStep& step) { return step.step.failure() != nullptr; }, "Whether an action failed.")
      .def_property_readonly(
          "failed_action",
          [](const LaneStep& step) -> std::optional<TurnTuple> {
            const PipelineFailure* failure = step.step.failure();
            if (failure == nullptr) return std::nullopt;
            return tuple_of(failure->action);
          },
          "The action that failed first: (stage, 'F' or 'B', micro-batch), or None.")
      .def(
          "take_cause",
          [](const LaneStep& step) {
            const PipelineFailure* failure = step.step.failure();
            return take_cause(failure == nullptr ? nullptr : failure->error);
          },
          "What the failed call of the body itself raised, or None if it returned. The second call returns None.")
      .def_property_readonly(
          "started", [](const LaneStep& step) { return step.started; },
          "When the workers got the step, in seconds of time.perf_counter().")
      .def_property_readonly(
          "record",
          [](const LaneStep& step) {
            ActionTuples stages;
            for (const auto& actions : step.step.record()) {
              auto& stage = stages.emplace_back();
              for (const ActionRecord& one : actions) {
                stage.emplace_back(letter_of(one.action.kind), one.action.micro_batch, one.start_seconds,
                                   one.finish_seconds);
              }
            }
            return stages;
          },
          "Per stage what ran, in order: ('F' or 'B', micro-batch, start seconds, finish seconds) each.");

  module.def("in_flight", [](const std::string& text, std::size_t stage) {
    return plan::in_flight(plan::schedule_of(text), stage);
  });
  module.def("forward_only",
             [](std::size_t stages, std::int64_t count) { return plan::to_text(plan::forward_only(stages, count)); });
  module.def(
      "pipeline_actions",
      [](const plan::StagePlan& plan) {
        const plan::Schedule& schedule = plan.schedule;
        const plan::PipelineTimes planned = plan::pipeline_times(schedule, plan.times);
        ActionTuples lists;
        for (std::size_t s = 0; s < schedule.stages.size(); ++s) {
          auto& list = lists.emplace_back();
          for (std::size_t a = 0; a < schedule.stages[s].size(); ++a) {
            const plan::Action& action = schedule.stages[s][a];
            const plan::ActionSpan& span = planned.actions[s][a];
            list.emplace_back(letter_of(action.kind), action.micro_batch, span.start, span.finish);
          }
        }
        return lists;
      },
      "plan"_a, "When the actions of a plan would run, as PipelineOutcome.record.");
  module.def("run_pipeline", &run_lanes, "group"_a, "lanes"_a, "schedule"_a, "devices"_a,
             "Run one step: the schedule as text (plan.to_text), with the device index of each stage.");
}

}  // namespace paceline::python
