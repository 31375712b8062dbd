// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <paceline/engine/pool_job.hpp>
#include <paceline/error.hpp>
#include <paceline/export.hpp>
#include <paceline/plan/pool_types.hpp>
#include <paceline/runtime/async_device.hpp>
#include <paceline/runtime/device.hpp>
#include <paceline/runtime/device_group.hpp>

namespace paceline {

class Pool;

namespace internal {

struct AddedGroups;

/// A job as the pool sees it. When nothing of it runs any more, end() is called once, and then call_back(), after all
/// jobs that ended at the same time have heard end(). Neither may throw.
class PACELINE_API PoolCall {
 public:
  PoolCall() = default;
  virtual ~PoolCall();
  PoolCall(const PoolCall&) = delete;
  PoolCall& operator=(const PoolCall&) = delete;
  virtual void run(Job& job) = 0;
  /// `error`: null if the job has completed.
  virtual void end(const JobReport& report, std::exception_ptr error) noexcept = 0;
  virtual void call_back() noexcept = 0;
  /// Runs `calls`, the call_back() of all jobs that ended at the same time, and what frees them. Example: holds an
  /// interpreter lock meanwhile, which is cheaper than once for each.
  virtual void together(const std::function<void()>& calls) noexcept { calls(); }
  /// Whether it only runs in batches of its kind.
  [[nodiscard]] virtual bool batched() const noexcept { return false; }
};

/// @throws InvalidArgument on a worker: the calling thread keeps a device, which what it waits for may need.
/// Unavailable after fork(), if the pool was made before.
PACELINE_API void check_may_wait(const std::weak_ptr<PoolCore>& pool);

/// How a job ended, for all who wait for it.
class PACELINE_API JobState {
 public:
  void end(const JobReport& report, std::exception_ptr error) noexcept;
  /// Calls what when_ended() was given. What these throw is dropped.
  void call_back() noexcept;
  void wait() const;
  [[nodiscard]] bool ended() const;
  /// Calls it when the job ends, or now if it has ended.
  void when_ended(std::function<void()> call);
  // Once it has ended:
  [[nodiscard]] const JobReport& report() const noexcept { return report_; }
  [[nodiscard]] const std::exception_ptr& error() const noexcept { return error_; }

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  bool ended_ = false;
  bool called_back_ = false;
  JobReport report_;
  std::exception_ptr error_;
  std::vector<std::function<void()>> then_;
};

template <class T>
struct JobResult : JobState {
  using Value = std::conditional_t<std::is_void_v<T>, std::nullptr_t, T>;
  std::optional<Value> value;  // set by the run, to be read once the job has ended
};

template <class T, class Call>
class TypedCall final : public PoolCall {
 public:
  TypedCall(Call call, std::shared_ptr<JobResult<T>> result) : call_(std::move(call)), result_(std::move(result)) {}
  void run(Job& job) override {
    if constexpr (std::is_void_v<T>) {
      call_(job);
      result_->value = nullptr;
    } else {
      result_->value = call_(job);
    }
  }
  void end(const JobReport& report, std::exception_ptr error) noexcept override { result_->end(report, error); }
  void call_back() noexcept override { result_->call_back(); }

 private:
  Call call_;
  std::shared_ptr<JobResult<T>> result_;
};

/// One request of a batched kind.
template <class Request, class Answer>
class RequestCall final : public PoolCall {
 public:
  RequestCall(Request one, std::shared_ptr<JobResult<Answer>> result)
      : request(std::move(one)), result_(std::move(result)) {}
  void run(Job&) override {}
  [[nodiscard]] bool batched() const noexcept override { return true; }
  void answer(Answer one) { result_->value = std::move(one); }
  void end(const JobReport& report, std::exception_ptr error) noexcept override { result_->end(report, error); }
  void call_back() noexcept override { result_->call_back(); }
  Request request;

 private:
  std::shared_ptr<JobResult<Answer>> result_;
};

}  // namespace internal

/// The result of a job, which may be there already. Copies are the same future. Threads: any.
template <class T>
class Future {
 public:
  Future(std::shared_ptr<internal::JobResult<T>> result, std::weak_ptr<internal::PoolCore> pool, JobId id)
      : result_(std::move(result)), pool_(std::move(pool)), id_(id) {}

  [[nodiscard]] JobId id() const noexcept { return id_; }
  operator JobHandle() const { return {id_, result_, pool_}; }  // NOLINT(google-explicit-constructor)
  /// @throws InvalidArgument in a job, a step or a call of then(), unless the job has ended: it would keep a device.
  void wait() const {
    if (!result_->ended()) internal::check_may_wait(pool_);
    result_->wait();
  }
  [[nodiscard]] bool ready() const { return result_->ended(); }
  /// @throws what the job has thrown; Rejected, Expired or Cancelled if it never ran; as wait(). If it comes after a
  /// job that did not complete, Cancelled has the error of the first such job nested in it (std::rethrow_if_nested).
  T get() const {
    wait();
    if (result_->error()) std::rethrow_exception(result_->error());
    if constexpr (!std::is_void_v<T>) return *result_->value;
  }
  /// Where and how long it ran. Waits.
  [[nodiscard]] JobReport report() const {
    wait();
    return result_->report();
  }
  /// Cancels a job that no worker has begun, and what comes after it. False: it runs, or has ended.
  bool cancel() const;
  /// Calls `call(future)` once the job has ended: on the worker that ran it, on the thread that cancelled it, on the
  /// pool's clock thread if it expired, or at once on this thread. What the call throws is dropped. It may submit. It
  /// must not wait for a pool: get() of a job that has not ended throws InvalidArgument there.
  void then(std::function<void(const Future&)> call) const {
    result_->when_ended([self = *this, call = std::move(call)] { call(self); });
  }

 private:
  std::shared_ptr<internal::JobResult<T>> result_;
  std::weak_ptr<internal::PoolCore> pool_;
  JobId id_;
};

/// Requests of one type, answered in batches. Made by Pool::serve().
template <class Request, class Answer>
class Batcher {
 public:
  Batcher(std::weak_ptr<internal::PoolCore> pool, std::string kind) : pool_(std::move(pool)), kind_(std::move(kind)) {}
  /// @throws as Pool::submit(), also when the pool is gone
  Future<Answer> submit(Request request, JobOptions options = {}) const;

 private:
  std::weak_ptr<internal::PoolCore> pool_;
  std::string kind_;
};

/// Independent jobs on the devices of a group: each starts on the device and at the time that plan::PoolState decides
/// from measured seconds. The pool's workers are those of the process, so steps of trainers on the same devices come
/// between its jobs; pools on the same devices take turns. A device that a job reports as lost (DeviceLost) is retired:
/// batches that ran there run elsewhere, other jobs fail, and so do those that no other device can run.
///
/// On a GPU a job enqueues its work on Job::stream() and returns. It ends, and its result is handed over, when the GPU
/// has done that work; no thread waits for it. One job or batch at a time is on each GPU. Work of steps on the same GPU
/// is on other streams, so the GPU does both at once.
///
/// With plan::Placement::custom the pool asks PoolOptions::choose without a lock, one thread at a time: that whose call
/// or run has changed something, or a worker. It drops an answer if the job has ended or other devices are idle by
/// then. While a device is idle the pool asks again after each event, and every 50 ms if the function let a job wait.
/// If the function throws, the fastest idle device takes the job, and explain() says why. In a closed pool whose other
/// jobs have ended, that device takes it, too. The function may submit, but not wait for a pool.
///
///   paceline::Pool pool(paceline::DeviceGroup::all(paceline::DeviceKind::host));
///   paceline::Future<double> f = pool.submit([](paceline::Job& job) { return score(job.device()); });
///   f.get();
///
/// Threads: any thread may submit, a job too.
class PACELINE_API Pool {
 public:
  /// @throws InvalidArgument for options that are not valid; Error if a GPU refuses.
  /// `budget`: the part of a device's time, from 0 to 1, that jobs may take from steps of trainers on its worker. On
  /// the host: those of Priority::interactive, or with a deadline of less than a second, which start before a step's
  /// next micro-batch; all start where a step has no work for the device. On a GPU: all, which compute beside the step.
  /// `memory_bytes`: what jobs may use of the memory of a device, by its name. Others have no limit.
  explicit Pool(DeviceGroup group, plan::PoolOptions options = {}, double budget = 0.1,
                const std::map<std::string, double>& memory_bytes = {});
  /// close(true). In a job, a step or a call of then() it waits only for what runs on other workers, and in one of this
  /// pool for nothing. It waits for a call of PoolOptions::choose that goes on, which close() does not.
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  /// Runs `call(job)` once on a device. What it returns or throws is in the future.
  /// @throws InvalidArgument for options that cannot be met by any state of the pool; Unavailable once closed.
  template <std::invocable<Job&> Call>
  Future<std::invoke_result_t<Call&, Job&>> submit(Call call, JobOptions options = {}) {
    using T = std::invoke_result_t<Call&, Job&>;
    auto result = std::make_shared<internal::JobResult<T>>();
    auto made = std::make_unique<internal::TypedCall<T, Call>>(std::move(call), result);
    const JobId id = submit_call(std::move(made), result, options).id;
    return {std::move(result), core_, id};
  }

  /// Requests of one type, which `call(job, requests, answers)` answers in batches of the sizes that are planned. It
  /// sets answers[k] for requests[k]. If it throws, the batch runs again in halves, so that only the request fails that
  /// is the reason: the call must be idempotent. Devices call it at the same time.
  template <class Request, class Answer, class Call>
    requires std::invocable<Call&, Job&, std::span<Request>, std::span<Answer>>
  Batcher<Request, Answer> serve(Call call, const BatchOptions& options = {}, std::string kind = "request") {
    add_batches(kind, options, [call = std::move(call)](Job& job, std::span<internal::PoolCall* const> calls) mutable {
      using One = internal::RequestCall<Request, Answer>;
      std::vector<Request> requests;
      requests.reserve(calls.size());
      // A copy: the batch may run again in halves.
      for (auto* one : calls) requests.push_back(static_cast<One*>(one)->request);
      std::vector<Answer> answers(calls.size());
      call(job, std::span<Request>(requests), std::span<Answer>(answers));
      for (std::size_t k = 0; k < calls.size(); ++k) static_cast<One*>(calls[k])->answer(std::move(answers[k]));
    });
    return {core_, std::move(kind)};
  }

  /// The device, by its name, starts nothing until it is restored. What runs there goes on. What has not begun runs
  /// elsewhere. restore() takes back a device that was lost, too.
  /// @throws InvalidArgument if the pool has no such device.
  void retire(const std::string& device);
  void restore(const std::string& device);
  /// One more device joins, with a worker. It takes work at once. `memory_bytes`: as of the constructor.
  /// @throws InvalidArgument if the pool has it, or for such a limit; Unavailable once closed; Error if a GPU refuses
  void add(const Device& device, double memory_bytes = std::numeric_limits<double>::infinity());
  /// Retires the device if another one is active. Returns whether. `released`: only if it is active itself, and
  /// restore() takes it back where work comes. So as many jobs may wait as before, and those are taken whose deadlines
  /// it keeps if it comes back `activation_seconds` after scale_tick() names it among PoolTick::covers.
  bool retire_unless_last(const std::string& device, bool released = false, double activation_seconds = 0.0);
  /// Calls this when deadlines of waiting jobs need released devices that they did not need before, or when what waits
  /// begins to take active devices longer than `wait_seconds`: then scale_tick() answers at once. On any thread, a
  /// worker's for example; it must be short, and must not throw.
  void on_wants_devices(std::function<void()> call, double wait_seconds = std::numeric_limits<double>::infinity());

  /// Jobs with this tenant's name have its weight and its quotas. See plan::PoolTenant.
  /// @throws InvalidArgument if the pool knows the name already, which a job may have brought, and for a weight or a
  /// quota that is not positive
  void add_tenant(plan::PoolTenant tenant);
  /// What tenants have and have had. The first one has no name: jobs without a tenant. That is all of it in a pool in
  /// which nobody has a name, and then nothing is counted.
  [[nodiscard]] std::vector<plan::PoolTenantUse> tenants() const;
  /// Lets go of what is kept for jobs of this kind, whatever memory they need, and of its model if no other kind has
  /// it: devices no longer keep that. Later jobs are measured anew; a kind that is served has to be served again.
  /// False: some of it waits or runs, and is kept.
  bool forget(const std::string& kind);
  /// A device no longer keeps a model (BatchOptions::model), which is freed there without an eviction. False: the pool
  /// knows none there, or a batch of it runs there.
  bool unload(const std::string& device, const std::string& model);

  /// Takes no more jobs, and waits until every job has ended and its calls of then() have returned. `cancel`: what does
  /// not run yet is cancelled, and no batch runs again.
  /// @throws InvalidArgument in a job, a step or a call of then()
  void close(bool cancel = false);

  /// Jobs that wait, and runs on devices.
  [[nodiscard]] std::int64_t waiting() const;
  [[nodiscard]] std::int64_t running() const;
  /// The names of the devices that start jobs: neither retired nor lost.
  [[nodiscard]] std::vector<std::string> active() const;
  /// The seconds until all that waits now would be served, by measured times: the figure to scale on. Jobs of
  /// Priority::background count as nothing.
  [[nodiscard]] double backlog_seconds() const;
  /// What has come since the call before, for plan::Scaler; none if that was less than so many seconds ago. Needs that
  /// jobs have had in the last `keep_seconds` are among PoolTick::covers.
  [[nodiscard]] std::optional<PoolTick> scale_tick(double least_seconds = 0.0, double keep_seconds = 0.0);
  /// From now on every event that the decisions see goes to this file, which is replaced, and what was decided: see
  /// plan/pool_ledger.hpp. `paceline replay` repeats the decisions.
  /// @throws InvalidArgument after the first job, after a device was retired, and if the file cannot be written
  void write_ledger(const std::filesystem::path& path);
  /// By the name of a device: jobs that completed, their runs, and the seconds of all runs.
  using Counts = std::map<std::string, std::tuple<std::int64_t, std::int64_t, double>>;
  /// Text: what each device has run, and why jobs wait. `counts`: what the pool's owner has counted, in place of the
  /// pool's own figures.
  [[nodiscard]] std::string explain(const Counts& counts = {}) const;

  // For bindings to other languages.
  /// What Job::stream() is on that device.
  [[nodiscard]] Stream* stream(const std::string& device) const;
  /// Once closed: ends the streams of GPUs, which otherwise end with the pool.
  void release() noexcept;
  /// From now on the destructor does not wait for PoolOptions::choose. So that function has to own what it uses.
  void leave_placement() noexcept { waits_for_placement_ = false; }
  using BatchCall = std::function<void(Job&, std::span<internal::PoolCall* const>)>;
  /// `state`: what the call's end() ends.
  JobHandle submit_call(std::unique_ptr<internal::PoolCall> call, std::shared_ptr<const internal::JobState> state,
                        const JobOptions& options);
  /// Jobs of this kind run in batches.
  void add_batches(const std::string& kind, const BatchOptions& options, BatchCall call);
  /// Cancels a job that no worker has begun, and what comes after it. False: it runs, or has ended.
  static bool cancel(const JobHandle& job);
  using Visit =
      std::function<void(plan::RunId, const Device&, const std::string& kind, std::span<internal::PoolCall* const>)>;
  /// Visits runs that have taken longer than so many seconds. `visit` must not call the pool.
  void visit_runs_over(double seconds, const Visit& visit) const;
  /// Ends the jobs of a run that goes on, with this error. None of them runs again. Another worker takes the place of
  /// the one that is in it, which ends with the run. On a GPU the run keeps its stream, and until the GPU has done it
  /// what it uses. Other jobs get another stream. False: the run has ended. @throws Error if a GPU has no other stream.
  bool give_up(plan::RunId run, const std::exception_ptr& error);

 private:
  template <class Request, class Answer>
  friend class Batcher;
  static JobHandle submit_to(const std::weak_ptr<internal::PoolCore>& pool, std::unique_ptr<internal::PoolCall> call,
                             std::shared_ptr<const internal::JobState> state, const JobOptions& options);

  DeviceGroup group_;
  std::shared_ptr<internal::PoolCore> core_;
  std::shared_ptr<internal::AddedGroups> added_;
  bool waits_for_placement_ = true;
};

template <class T>
bool Future<T>::cancel() const {
  return Pool::cancel(*this);
}

template <class Request, class Answer>
Future<Answer> Batcher<Request, Answer>::submit(Request request, JobOptions options) const {
  auto result = std::make_shared<internal::JobResult<Answer>>();
  auto call = std::make_unique<internal::RequestCall<Request, Answer>>(std::move(request), result);
  options.kind = kind_;
  const JobHandle job = Pool::submit_to(pool_, std::move(call), result, options);
  return {std::move(result), job.pool, job.id};
}

}  // namespace paceline
