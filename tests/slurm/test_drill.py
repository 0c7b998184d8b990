"""The drill's verdict on logs whose answer is known."""

import math
from typing import Any

import pytest

from pretrain.cluster.drill import judge


def log(losses: dict[int, float], *, saved: float | None = None, resumed: float | None = None, at: int = 2) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = [{"kind": "train", "step": step, "loss_nats_per_token": loss} for step, loss in losses.items()]
    records += [] if saved is None else [{"kind": "event", "step": at, "event": "checkpoint", "time": saved}]
    return records + ([] if resumed is None else [{"kind": "event", "step": at, "event": "resume", "time": resumed}])


STRAIGHT = {1: 4.0, 2: 3.0, 3: 2.0}


def verdict(interrupted: list[dict[str, Any]], *, tolerance: float = 0.0, ended: tuple[str, ...] = ()) -> Any:
    return judge(log(STRAIGHT), interrupted, steps=3, signalled=100.0, tolerance=tolerance, ended=list(ended))


def test_identical_losses_pass_with_their_figures() -> None:
    found = verdict(log(STRAIGHT, saved=101.5, resumed=160.0))
    assert found.problems == [] and (found.resumed_at, found.save_seconds, found.requeue_seconds, found.largest) == (2, 1.5, 58.5, 0.0)
    assert found.describe() == "drill passed: saved 1.5 s after the signal, resumed at step 2 58.5 s later, largest difference of 3 losses 0"


@pytest.mark.parametrize(
    ("interrupted", "sentence"),
    [
        (log(STRAIGHT), "was not resumed: nothing was saved after the signal"),
        (log(STRAIGHT, saved=101.0), "was not resumed: raise drill.steps"),
        (log(STRAIGHT | {3: 2.2}, saved=101.0, resumed=102.0), "losses differ by up to 0.1, and drill.tolerance=0 allows less"),
        (log(STRAIGHT | {3: math.nan}, saved=101.0, resumed=102.0), "losses differ by up to nan"),
        (log({1: 4.0, 2: 3.0}, saved=101.0, resumed=102.0), "the logs share 2 of 3 steps"),
    ],
)
def test_each_way_to_fail(interrupted: list[dict[str, Any]], sentence: str) -> None:
    found = verdict(interrupted)
    assert found.describe().startswith("drill FAILED: ") and sentence in found.describe()


def test_a_tolerance_is_inclusive_and_a_failed_job_is_a_failed_drill() -> None:
    near = log(STRAIGHT | {3: 2.02}, saved=101.0, resumed=102.0)
    assert not verdict(near, tolerance=0.011).problems and verdict(near, tolerance=0.009).problems
    assert "job 5 ended" in verdict(log(STRAIGHT, saved=1.0, resumed=2.0), ended=("job 5 ended as failed",)).describe()
