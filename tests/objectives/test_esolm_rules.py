"""Constants of Eso-LM that would do nothing are refused, each with a fix that is legal when it is followed."""

from dataclasses import replace
from typing import Any

import pytest

from pretrain.errors import UserError
from pretrain.objectives.config import EsoLMConfig, ObjectiveConfig
from pretrain.objectives.rules import check_objective


def esolm(section: dict[str, Any], **constants: Any) -> ObjectiveConfig:
    return ObjectiveConfig(name="esolm", esolm=EsoLMConfig(**section), **constants)


LEGAL = [
    esolm({}),
    esolm({}, low_variance=False, evaluation="authors", time_eps=1e-2),
    esolm({"evaluate": "any_order", "orders": 8}),
    esolm({"alpha_0": 0.5, "batch_split": 0.25}, schedule_eps=0.0, evaluation="authors"),
    esolm({"alpha_0": 0.5, "evaluate": "any_order", "orders": 8}),
    esolm({"alpha_0": 0.0}),
    esolm({"alpha_0": 0.0, "evaluate": "any_order"}),
]
REFUSED = [
    (esolm({"batch_split": 0.3}), r"esolm\.batch_split=0\.3 needs both phases, and .*alpha_0=1 has one.*use objective\.esolm\.alpha_0=0\.5"),
    (esolm({"alpha_0": 0.0, "batch_split": 0.3}), r"esolm\.batch_split=0\.3 .*alpha_0=0 has one"),
    (esolm({"alpha_0": 0.0}, time_eps=1e-2), r"objective\.time_eps=0\.01 belongs to diffusion, .*alpha_0=0 leaves out"),
    (esolm({"alpha_0": 0.0}, schedule_eps=0.0), r"objective\.schedule_eps=0\.0 belongs to diffusion"),
    (esolm({"alpha_0": 0.0}, evaluation="authors"), r"objective\.evaluation=authors belongs to diffusion"),
    (esolm({"alpha_0": 0.0}, low_variance=True), r"objective\.low_variance=True has no meaning for esolm at objective\.esolm\.alpha_0=0"),
    (esolm({"alpha_0": 0.0, "evaluate": "any_order", "orders": 2}), r"esolm\.orders=2 .*one order, from left to right, is exact"),
    (esolm({"orders": 2}), r"esolm\.orders=2 belongs to objective\.esolm\.evaluate=any_order"),
    (esolm({"evaluate": "any_order"}, evaluation="authors"), r"objective\.evaluation=authors is about diffusion times"),
]


@pytest.mark.parametrize("objective", LEGAL, ids=str)
def test_legal(objective: ObjectiveConfig) -> None:
    check_objective(objective)


@pytest.mark.parametrize(("objective", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_refused_in_one_sentence(objective: ObjectiveConfig, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_objective(objective)


def test_the_suggested_fixes_are_legal() -> None:
    check_objective(replace(REFUSED[0][0], esolm=EsoLMConfig(alpha_0=0.5, batch_split=0.3)))
    check_objective(esolm({"evaluate": "any_order", "orders": 2}))
    for objective, _ in REFUSED:
        kept = EsoLMConfig(alpha_0=objective.esolm.alpha_0, evaluate=objective.esolm.evaluate)
        check_objective(ObjectiveConfig(name="esolm", esolm=kept))
