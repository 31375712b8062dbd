"""The benchmark of predicted steps: that it compares what is of one round. Speeds are not tested."""

from __future__ import annotations

import check_worth


def test_a_prediction_is_compared_with_the_step_of_its_round() -> None:
    measured = [{"a b": 10.0, "a": 20.0}, {"a b": 100.0, "a": 200.0}, {"a b": 1000.0, "a": 2000.0}]
    predicted = [{"a": 20.0}, {"a b": 110.0, "a": 200.0}, {"a b": 1100.0, "a": 2000.0}]  # at first b has no work
    found = check_worth.compared(list(zip(predicted, measured, strict=True)))
    assert found["a b"]["ratios"] == [1.1, 1.1]
    assert (found["a b"]["ratio"], found["a b"]["measured_ms"]) == (1.1, 100.0)
    assert found["a"]["ratio"] == 1.0
    never = check_worth.compared([({"a": 1.0}, {"a b": 10.0, "a": 1.0})])
    assert never["a b"] == {"measured_ms": 10.0, "ratio": None}
