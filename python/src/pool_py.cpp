// SPDX-License-Identifier: Apache-2.0
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <exception>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include <paceline/engine/pool.hpp>
#include <paceline/error.hpp>
#include <paceline/runtime/blocking.hpp>

#include "bindings.hpp"
#include "worker_gil.hpp"

namespace py = pybind11;

namespace paceline::python {
namespace {

// What a Python body returns.
constexpr int kFailed = -1;
constexpr int kOutOfMemory = -2;
constexpr int kLost = -3;

/// The body has failed. Python keeps its exception.
void check(int code) {
  if (code == kOutOfMemory) throw OutOfMemory("The job ran out of memory.");
  if (code == kLost) throw DeviceLost("The job's device is lost.");
  if (code == kFailed) throw Error("The job failed.");
}

std::vector<std::string> names_of(const Job& job) {
  std::vector<std::string> names;
  for (const Device* device : job.devices()) names.push_back(device->name);
  return names;
}

/// Names of devices and of models.
std::vector<std::pair<std::string, std::string>> evicted_by(const Job& job) {
  std::vector<std::pair<std::string, std::string>> all;
  for (const Job::Eviction& one : job.evicted()) all.emplace_back(one.device, one.model);
  return all;
}

const char* outcome_of(const std::exception_ptr& error, std::string& message) {
  if (!error) return "completed";
  try {
    std::rethrow_exception(error);
  } catch (const Rejected& why) {
    message = why.what();
    return "rejected";
  } catch (const Expired& why) {
    message = why.what();
    return "expired";
  } catch (const Cancelled& why) {
    message = why.what();
    return "cancelled";
  } catch (const OutOfMemory& why) {
    message = why.what();
    return "out_of_memory";
  } catch (const DeviceLost& why) {
    message = why.what();
    return "device_lost";
  } catch (const Timeout& why) {
    message = why.what();
    return "timeout";
  } catch (const std::exception& why) {
    message = why.what();
  } catch (...) {
    message = "unknown";
  }
  return "failed";
}

/// A job of Python's: run(names of devices, evicted models) -> int, called once, and end(device, seconds, outcome,
/// message), called again if it raises.
class PythonCall final : public internal::PoolCall {
 public:
  PythonCall(py::object job, std::shared_ptr<internal::JobState> state, bool batched)
      : job_(std::move(job)), state_(std::move(state)), batched_(batched) {}
  ~PythonCall() override { drop(job_); }
  void run(Job& job) override {
    check(with_interpreter([&] { return call_python(job_.attr("run"), names_of(job), evicted_by(job)).cast<int>(); }));
  }
  void end(const JobReport& report, std::exception_ptr error) noexcept override {
    device_ = report.device;
    seconds_ = report.seconds;
    outcome_ = outcome_of(error, message_);
    state_->end(report, std::move(error));
  }
  // On a worker, or on the thread that has cancelled the job, whose thread state is Python's own.
  void call_back() noexcept override {
    state_->call_back();
    if (interpreter_is_ending()) return;
    on_any_thread([&] { tell(); });
  }
  void together(const std::function<void()>& calls) noexcept override {
    if (interpreter_is_ending()) {
      calls();
    } else {
      on_any_thread(calls);
    }
  }
  [[nodiscard]] bool batched() const noexcept override { return batched_; }
  [[nodiscard]] const py::object& job() const noexcept { return job_; }

 private:
  /// A signal handler may raise anywhere in end(), on the main thread. Then end() goes on where it was, since somebody
  /// may wait for the job, and the interrupt follows.
  void tell() {
    constexpr int most = 3;
    bool interrupted = false;
    for (int tries = 0; tries < most; ++tries) {
      try {
        call_python(job_.attr("end"), device_, seconds_, outcome_, message_);
        break;
      } catch (py::error_already_set& failed) {
        if (interrupts(failed)) {
          interrupted = true;
        } else {
          failed.discard_as_unraisable("the end of a job");
        }
      }
    }
    if (interrupted) PyErr_SetInterrupt();
  }

  py::object job_;
  std::shared_ptr<internal::JobState> state_;
  bool batched_;
  std::string device_{};
  double seconds_ = 0.0;
  const char* outcome_ = "";
  std::string message_{};
};

/// Requests run as run_batch(names of devices, evicted models, requests) of the first of them. It returns a code, the
/// seconds that do not count, and those of loading the model. So the pool refers to what answers requests only while
/// some wait, and Python's collector sees every cycle that lasts.
void run_batch(Job& job, std::span<internal::PoolCall* const> calls) {
  check(with_interpreter([&] {
    py::list jobs;
    for (auto* const call : calls) jobs.append(static_cast<PythonCall*>(call)->job());
    const auto [code, excluded, loaded] = call_python(jobs[0].attr("run_batch"), names_of(job), evicted_by(job), jobs)
                                              .cast<std::tuple<int, double, std::optional<double>>>();
    job.exclude(excluded);
    if (loaded) job.loaded(*loaded);
    return code;
  }));
}

/// A pool whose jobs are Python objects.
class PythonPool : public Pool {
 public:
  PythonPool(const DeviceGroup& group, const std::variant<std::string, PlacementFunction>& placement, double budget,
             const std::map<std::string, double>& memory)
      : Pool(group, with_placement({}, "Pool: ", placement, false), budget, memory) {}
  ~PythonPool() {
    leave_placement();  // a thread in it may never come back once the interpreter is ending
    const BlockingRegion without_gil;
    try {
      close(true);
    } catch (const std::exception&) {  // nothing that a destructor could tell
    }
  }
  PythonPool(const PythonPool&) = delete;
  PythonPool& operator=(const PythonPool&) = delete;

  JobHandle submit(py::object job, const JobOptions& options, bool batched) {
    const auto state = std::make_shared<internal::JobState>();
    auto call = std::make_unique<PythonCall>(std::move(job), state, batched);
    // With the interpreter's lock, which only a wait for room gives up. Nobody asks for it under the pool's mutex: the
    // pool asks a user's placement without that.
    return submit_call(std::move(call), state, options);
  }

  /// Called with the interpreter's lock, which no one who has the pool's waits for.
  [[nodiscard]] py::list runs_over(double seconds) const {
    py::list found;
    visit_runs_over(seconds, [&](plan::RunId run, const Device& device, const std::string& kind,
                                 std::span<internal::PoolCall* const> calls) {
      py::list jobs;
      for (auto* const call : calls) jobs.append(static_cast<PythonCall*>(call)->job());
      found.append(py::make_tuple(static_cast<std::uint64_t>(run), device.name, kind, jobs));
    });
    return found;
  }

  bool retire(const std::string& device, bool unless_last, bool released, double activation_seconds) {
    const BlockingRegion without_gil;
    if (unless_last) return retire_unless_last(device, released, activation_seconds);
    Pool::retire(device);
    return true;
  }

  void on_wants_devices(py::object call, double wait) {
    Pool::on_wants_devices(callable_on_any_thread(std::move(call)), wait);
  }

  [[nodiscard]] std::optional<std::uintptr_t> stream_handle(const std::string& device) const {
    const Stream* const found = stream(device);
    return found == nullptr ? std::nullopt : std::optional(reinterpret_cast<std::uintptr_t>(found->native()));
  }

  void add_tenant(std::string name, double weight, std::optional<std::int64_t> devices, std::optional<double> memory) {
    const plan::PoolTenant usual;
    const BlockingRegion without_gil;
    Pool::add_tenant({.name = std::move(name),
                      .weight = weight,
                      .devices = devices.value_or(usual.devices),
                      .memory_bytes = memory.value_or(usual.memory_bytes)});
  }

  [[nodiscard]] py::list tenant_uses() const {
    std::vector<plan::PoolTenantUse> all;
    {
      const BlockingRegion without_gil;
      all = tenants();
    }
    py::list found;
    for (const plan::PoolTenantUse& one : all) {
      found.append(
          py::make_tuple(one.tenant.name, one.tenant.weight, one.served, one.waiting, one.devices, one.memory_bytes));
    }
    return found;
  }

  [[nodiscard]] py::object next_tick(double least_seconds, double keep_seconds) {
    const std::optional<PoolTick> tick = [&] {
      const BlockingRegion without_gil;
      return scale_tick(least_seconds, keep_seconds);
    }();
    if (!tick) return py::none();
    return py::make_tuple(tick->seconds, tick->arrived_work, tick->arrived_jobs, tick->waiting_work,
                          py::make_tuple(tick->runs, tick->run_work, tick->run_square), tick->filling, tick->known,
                          tick->speeds, tick->lost, tick->covers);
  }
};

}  // namespace

void bind_pool(py::module_& module) {
  py::class_<JobHandle>(module, "Job", "A job of a pool.");
  py::class_<PythonPool>(module, "Pool", "Runs jobs on the devices of a group, as the pool decides.")
      .def(py::init<const DeviceGroup&, const std::variant<std::string, PlacementFunction>&, double,
                    const std::map<std::string, double>&>(),
           py::arg("group"), py::arg("placement") = "auto", py::arg("budget") = 0.1,
           py::arg("memory") = std::map<std::string, double>{})
      .def(
          "submit",
          [](PythonPool& self, py::object job, std::string kind, int priority, double deadline, double not_before,
             std::int64_t gang, std::vector<JobHandle> after, std::vector<std::string> needs,
             std::vector<std::string> devices, double cost, double memory, std::string tenant, double charge, bool own,
             bool wait, bool batched) {
            return self.submit(std::move(job),
                               {.kind = std::move(kind),
                                .priority = static_cast<Priority>(priority),
                                .deadline_seconds = deadline,
                                .not_before_seconds = not_before,
                                .gang = gang,
                                .after = std::move(after),
                                .needs = std::move(needs),
                                .devices = std::move(devices),
                                .cost = cost,
                                .memory_bytes = memory,
                                .tenant = std::move(tenant),
                                .charge = charge,
                                .own = own,
                                .wait_for_room = wait},
                               batched);
          },
          py::arg("job"), py::arg("kind"), py::arg("priority"), py::arg("deadline"), py::arg("not_before"),
          py::arg("gang"), py::arg("after"), py::arg("needs"), py::arg("devices"), py::arg("cost"), py::arg("memory"),
          py::arg("tenant"), py::arg("charge"), py::arg("own"), py::arg("wait"), py::arg("batched"),
          "Submit an object with run(devices, evicted) -> int and end(device, seconds, outcome, message).")
      .def(
          "add_batches",
          [](PythonPool& self, const std::string& kind, std::int64_t max_batch, double max_delay, bool padded,
             double memory, std::string model, double resident) {
            self.add_batches(kind,
                             {.max_batch = max_batch,
                              .max_delay_seconds = max_delay,
                              .padded = padded,
                              .bytes_per_request = memory,
                              .model = std::move(model),
                              .resident_bytes = resident},
                             run_batch);
          },
          py::arg("kind"), py::kw_only(), py::arg("max_batch"), py::arg("max_delay"), py::arg("padded"),
          py::arg("memory"), py::arg("model"), py::arg("resident"),
          "Let jobs of this kind run in batches: run_batch(devices, evicted, jobs) of the first one, which returns a "
          "code, the seconds that do not count, and those of loading the model or None.")
      .def("runs_over", &PythonPool::runs_over, py::arg("seconds"),
           "Of runs that have taken longer: number, device, kind, jobs.")
      .def(
          "give_up",
          [](PythonPool& self, std::uint64_t run, const std::string& message, const std::string& device) {
            return self.give_up(static_cast<plan::RunId>(run), std::make_exception_ptr(Timeout(message, device)));
          },
          py::arg("run"), py::arg("message"), py::arg("device"), py::call_guard<BlockingRegion>(),
          "End the jobs of a run that goes on, and replace its worker. False: it has ended.")
      .def_static("cancel", &Pool::cancel, py::arg("job"), py::call_guard<BlockingRegion>(),
                  "Cancel a job that waits. False: it runs, or has ended.")
      .def_static(
          "check_may_wait", [](const JobHandle& job) { internal::check_may_wait(job.pool); }, py::arg("job"),
          "Raise on a worker, and in a process that was forked from that of the pool.")
      .def("retire", &PythonPool::retire, py::arg("device"), py::arg("unless_last") = false,
           py::arg("released") = false, py::arg("activation_seconds") = 0.0,
           "Returns whether it did: not with `unless_last` if no other device is active. `released`: only an active "
           "one; as many jobs may wait as before, and deadlines count on the device to come back in so many seconds.")
      .def("on_wants_devices", &PythonPool::on_wants_devices, py::arg("call"), py::arg("wait_seconds"),
           "Call this, on any thread, when deadlines need more released devices, or active ones begin to take longer.")
      .def("restore", &PythonPool::restore, py::arg("device"), py::call_guard<BlockingRegion>())
      .def(
          "add",
          [](PythonPool& self, const Device& device, std::optional<double> memory) {
            self.add(device, memory.value_or(std::numeric_limits<double>::infinity()));
          },
          py::arg("device"), py::arg("memory") = py::none(), py::call_guard<BlockingRegion>(),
          "One more device, which takes work at once.")
      .def("add_tenant", &PythonPool::add_tenant, py::arg("name"), py::kw_only(), py::arg("weight") = 1.0,
           py::arg("devices") = py::none(), py::arg("memory") = py::none())
      .def("tenants", &PythonPool::tenant_uses,
           "Of each: name, weight, served, waiting, devices and bytes in use. The first one has no name.")
      .def("forget", &PythonPool::forget, py::arg("kind"), py::call_guard<BlockingRegion>(),
           "Let go of what is kept for a kind. False: some of it waits or runs, and is kept.")
      .def("unload", &PythonPool::unload, py::arg("device"), py::arg("model"), py::call_guard<BlockingRegion>(),
           "A device no longer keeps a model. False: it is not there, or a batch of it runs there.")
      .def("stream", &PythonPool::stream_handle, py::arg("device"),
           "CUDA's handle of a GPU's stream; None on the host.")
      .def(
          "write_ledger", [](PythonPool& self, const std::string& path) { self.write_ledger(path); }, py::arg("path"),
          py::call_guard<BlockingRegion>(), "Write every event and decision to this file from now on.")
      .def("release", &PythonPool::release, py::call_guard<BlockingRegion>(), "Once closed: end the streams.")
      .def("close", &PythonPool::close, py::arg("cancel"), py::call_guard<BlockingRegion>(),
           "Wait until every job has ended.")
      .def_property_readonly("active", &PythonPool::active,
                             "The names of the devices that start jobs: neither retired nor lost.")
      .def_property_readonly("waiting", &PythonPool::waiting)
      .def_property_readonly("running", &PythonPool::running)
      .def("scale_tick", &PythonPool::next_tick, py::arg("least_seconds"), py::arg("keep_seconds"),
           "Since the call before: seconds, work and jobs that came, work that waits, the runs of what came (how many, "
           "their work, the sum of its squares), seconds in which batches fill, whether all that waits is known, "
           "the speed of each device, which are lost, and sets of devices of which so many have to be active. None: "
           "it was less than `least_seconds` ago. Needs of the last `keep_seconds` count.")
      .def_property_readonly("backlog_seconds", &PythonPool::backlog_seconds)
      .def("explain", &PythonPool::explain, py::arg("counts") = Pool::Counts{},
           "Text. `counts`: by device jobs, runs and busy seconds.");
}

}  // namespace paceline::python
