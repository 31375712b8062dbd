"""The rules of the balancer, each with the edits that turn it off."""

from __future__ import annotations

from typing import NamedTuple


class Edit(NamedTuple):
    """A text that occurs exactly once in a file of cpp/src/balance, and what replaces it."""

    file: str
    old: str
    new: str


class Rule(NamedTuple):
    name: str
    lines: int  # of code that go with the rule, about
    edits: tuple[Edit, ...]
    blind: bool = False  # The simulated machines never do what the rule is for.


def _rule(name: str, lines: int, *edits: tuple[str, str, str], blind: bool = False) -> Rule:
    return Rule(name, lines, tuple(Edit(*edit) for edit in edits), blind)


_AUTO, _CHANGES, _ESTIMATOR = "auto_policy.cpp", "change_points.cpp", "estimator.cpp"
_EXPLORER, _TARGET, _JUDGE = "explorer.cpp", "target.cpp", "move_judge.cpp"
_REDUCTION, _SHAPE, _STARTUP = "reduction_cost.cpp", "shape.cpp", "startup_cost.cpp"

RULES = [
    # Speeds that change.
    _rule(
        "change points",
        110,
        (_CHANGES, "const bool is_outlier = std::abs(apart) > allowed;", "const bool is_outlier = apart > 1e300;"),
    ),
    _rule("a change point needs two outliers", 5, (_CHANGES, "kLeastRun = 2;", "kLeastRun = 1;")),
    _rule("a large change is believed at once", 8, (_CHANGES, "size <= kKeepsWork &&", "size <= 0.0 &&")),
    _rule(
        "memory of excursions", 25, (_CHANGES, "if (size > kActedUponAtOnce) return 0;", "if (size >= 0.0) return 0;")
    ),
    _rule(
        "changes beyond 1.4 times are no excursions",
        3,
        (_CHANGES, "kActedUponAtOnce = 0.336;", "kActedUponAtOnce = 1e300;"),
    ),
    _rule("the way back is believed at once", 12, (_CHANGES, "if (device.change_size <= 0.0)", "if (index < 1e300)")),
    _rule(
        "the step that a change falls into is dropped",
        5,
        (_CHANGES, "> std::numbers::sqrt2 * allowed;", "> 1e300 * allowed;"),
        blind=True,
    ),
    _rule(
        "tolerance grows where the shape is unknown",
        2,
        (_CHANGES, "kShapeSigmas = 3.0;", "kShapeSigmas = 0.0;"),
    ),
    _rule(
        "drift",
        33,
        (
            _ESTIMATOR,
            "if (step % kDriftEvery != 0 || window.size() < 2 * kRecent) return;",
            "if (step >= 0) return;",
        ),
    ),
    # Noise.
    _rule(
        "common noise",
        45,
        (_ESTIMATOR, "const bool separable = working > 1 && !known.empty();", "const bool separable = false;"),
    ),
    _rule(
        "residuals without their part in the common factor",
        8,
        (_ESTIMATOR, "one.sample.to_own = std::sqrt(count / (count + 1.0));", "one.sample.to_own = 1.0;"),
        (
            _ESTIMATOR,
            "const double to_own = count > 1.0 ? std::sqrt(count / (count - 1.0)) : 0.0;",
            "const double to_own = 1.0;",
        ),
    ),
    _rule("noise memory", 100, ("noise_memory.cpp", "return std::max(1.0, factor);", "return 1.0;")),
    _rule("noise memory before it is measured", 6, ("noise_memory.cpp", "kPriorFirst = 0.36;", "kPriorFirst = 0.0;")),
    _rule("prior of the noise", 6, (_ESTIMATOR, "kPriorNoiseSamples = 8.0;", "kPriorNoiseSamples = 1e-9;")),
    # Equal devices.
    _rule(
        "clusters",
        130,
        (
            "clusters.cpp",
            "for (std::size_t reach = 1; reach < clusters.size();) {",
            "for (std::size_t reach = 1; reach > clusters.size();) {",
        ),
    ),
    _rule(
        "memory of clusters",
        14,
        ("clusters.cpp", "(apart ? kEqualAgainErrors : kEqualErrors)", "(apart ? kEqualErrors : kEqualErrors)"),
    ),
    # Sizes.
    _rule("shapes are learnt", 150, (_SHAPE, "if (proportional_) return;", "if (step >= 0) return;")),
    _rule("calibration", 152, (_AUTO, "if (!explorer_.calibrated() && ", "if (context.step < 0 && ")),
    _rule("calibration lowers the slow devices", 12, (_EXPLORER, "kMuchSlower = 1.5;", "kMuchSlower = 1e300;")),
    _rule(
        "growth is held to twofold",
        30,
        (_TARGET, "if (room >= context.batch_size && smallest / 2 >= gap)", "if (room < 0 && smallest < gap)"),
    ),
    _rule(
        "growth off the split",
        45,
        (
            _EXPLORER,
            "if (context.step % kGrowEvery != 0) return std::nullopt;",
            "if (context.step >= 0) return std::nullopt;",
        ),
    ),
    _rule("growth of a class that was left out", 35, (_EXPLORER, "kMostHopes = 8;", "kMostHopes = 0;")),
    # What a step costs beside its items.
    _rule("reductions are measured", 100, (_REDUCTION, "if (working == 0 || working", "if (seconds > -1.0 || working")),
    _rule(
        "negligible reductions count as none",
        4,
        (_REDUCTION, "kNegligibleReduction = 0.002;", "kNegligibleReduction = 0.0;"),
    ),
    _rule("starts are measured", 88, (_STARTUP, "if (!seconds[i]) continue;", "if (i < 1e9) continue;")),
    _rule(
        "two early starts are a new beginning",
        10,
        (_STARTUP, "if (device.early && was_early)", "if (was_early && !was_early)"),
    ),
    _rule("negligible starts count as none", 2, (_STARTUP, "kNegligibleStart = 0.005;", "kNegligibleStart = 0.0;")),
    # The decision.
    _rule("two samples before a move", 2, (_AUTO, "kLeastStepsMeasured = 2;", "kLeastStepsMeasured = 1;")),
    _rule("gate: 1 %", 2, ("target.hpp", "kLeastGain = 0.01;", "kLeastGain = 0.0;")),
    _rule("gate: 2 standard errors", 34, (_TARGET, "kGainErrors = 2.0;", "kGainErrors = 0.0;")),
    _rule(
        "gate: both",
        36,
        ("target.hpp", "kLeastGain = 0.01;", "kLeastGain = 0.0;"),
        (_TARGET, "kGainErrors = 2.0;", "kGainErrors = 0.0;"),
    ),
    _rule(
        "ties go to the present shares",
        1,
        (_TARGET, "if (context.incumbent != nullptr) options.previous = *context.incumbent;\n", ""),
    ),
    _rule("newsvendor", 12, (_TARGET, "if (!cautious || working < 3) return plain;", "if (working > 0) return plain;")),
    _rule(
        "provisional moves",
        14,
        (
            _AUTO,
            "const bool completes = samples >= kSettledSamples && provisional_.contains(context.batch_size);",
            "const bool completes = false;",
        ),
    ),
    _rule(
        "rent",
        38,
        (
            _AUTO,
            "if (const double cost = cost_of(context, decision.target); cost > 0.0) {",
            "if (const double cost = 0.0; cost > 0.0) {",
        ),
    ),
    _rule(
        "rent of a broken promise is forgotten",
        13,
        (_AUTO, "if (now - then < kPromiseKept * required * now) rents_.erase(rent);", "static_cast<void>(then);"),
    ),
    # What became of a move.
    _rule("moves are taken back", 120, (_JUDGE, "if (loss <= move.resolution) {", "if (loss < 1e300) {")),
    _rule(
        "no move for a while after one was taken back",
        5,
        (_AUTO, "firm_until_step_ = context.step + firm_steps_;", ""),
    ),
    _rule(
        "unsettled steps judge no move",
        6,
        (_AUTO, "as_planned && !context.estimator.unsettled();", "as_planned;"),
    ),
    _rule(
        "steps off the plan judge no move",
        30,
        (_AUTO, "if (ran < shares[i] - ran) return false;", "if (ran < 0) return false;"),
        blind=True,
    ),
    # Devices without work.
    _rule(
        "probes",
        215,
        (_EXPLORER, "if (idle.empty()) return std::nullopt;", "if (context.step >= 0) return std::nullopt;"),
    ),
    _rule("quick probes", 6, (_EXPLORER, "kQuickProbes = 4;", "kQuickProbes = 0;")),
    _rule(
        "a probe that comes out differently is repeated",
        6,
        (_EXPLORER, "if (context.estimator.doubtful(i) || context.startup.doubtful(i)) {", "if (context.step < 0) {"),
    ),
    _rule(
        "only probes that could pay",
        24,
        (_EXPLORER, "if (due && !could_pay(context, models, present, i)) {", "if (due && !due) {"),
    ),
    _rule(
        "dear probes are rare",
        8,
        (_EXPLORER, "kFirstBudget = 0.02;", "kFirstBudget = 1e300;"),
        (_EXPLORER, "kBudget = 0.005;", "kBudget = 1e300;"),
    ),
    _rule(
        "late devices are probed soon",
        3,
        (_EXPLORER, "kFirstWaitOfLate = 8;", "kFirstWaitOfLate = kFirstWait;"),
    ),
    # Sizes of micro-batches.
    _rule(
        "search for the size of micro-batches",
        300,
        ("size_search.cpp", "if (trials_.empty() && rest_ > 1) {", "if (rest_ > 0) {"),
        blind=True,
    ),
    _rule(
        "a little-known device tries a correction",
        6,
        ("balancer.cpp", "if (is_little_known(estimator, i)) made.models[i]", "if (step < 0) made.models[i]"),
        blind=True,
    ),
]
