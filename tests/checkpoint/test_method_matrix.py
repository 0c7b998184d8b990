"""Any layout to any layout for the objectives with something of their own: parameters, their optimizer, running statistics, a curriculum.

MDLM and AR are in test_reshape.py. Each run keeps an average of the weights.
"""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from pretrain.objectives.config import DuoConfig, EsoLMConfig, MDMPrimeConfig, ObjectiveConfig, RePlaidConfig
from tests.checkpoint.runs import DIT, load_run, save_run
from tests.distributed import run_distributed

METHODS = {
    # The curriculum ends two steps after the checkpoint.
    "duo": ObjectiveConfig(name="duo", duo=DuoConfig(curriculum="topk", top_k=4, curriculum_end=4)),
    "esolm": ObjectiveConfig(name="esolm", esolm=EsoLMConfig(alpha_0=0.5)),
    "replaid": ObjectiveConfig(name="replaid", replaid=RePlaidConfig(latent=8, schedule_hidden=16, prior_ramp_steps=4)),
    "prime": ObjectiveConfig(name="mdm_prime", mdm_prime=MDMPrimeConfig(digits=6)),
}
SOURCES = {
    "duo": (2, {"zero_stage": 3}),
    "esolm": (2, {"tensor": 2}),
    "replaid": (4, {"tensor": 2, "pipeline": 2}),
    "prime": (2, {}),
}
TARGETS = {
    "duo": [(1, {}), (2, {"pipeline": 2}), (4, {"tensor": 2})],
    "esolm": [(1, {}), (2, {"zero_stage": 2}), (4, {"tensor": 2, "pipeline": 2})],
    "replaid": [(1, {}), (2, {"zero_stage": 3}), (4, {"tensor": 2})],
    "prime": [(2, {"tensor": 2}), (2, {"zero_stage": 3}), (4, {"pipeline": 2})],
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    @cache
    def of(method):
        run = tmp_path_factory.mktemp(method)
        ranks, sizes = SOURCES[method]
        return run, *run_distributed(save_run, ranks, replace(DIT, objective=METHODS[method]).laid(**sizes), str(run))[0]

    return of


@pytest.mark.slow
@pytest.mark.parametrize(("method", "ranks", "sizes"), [(method, *target) for method, targets in TARGETS.items() for target in targets])
def test_resume_in_another_layout(saved, method, ranks, sizes):
    run, tensors, losses = saved(method)
    got, continued = run_distributed(load_run, ranks, replace(DIT, objective=METHODS[method]).laid(**sizes), str(run))[0]
    assert got.keys() == tensors.keys()
    assert all(np.array_equal(got[name], tensors[name]) for name in tensors)
    assert any(name.startswith("objective/optimizer/") for name in tensors) == (method == "replaid")
    assert len(losses) == 5
    np.testing.assert_allclose(continued, losses, rtol=1e-5)
