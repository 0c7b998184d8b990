"""Whole runs of the objectives that do more than mask: killed and resumed bitwise, resumed in other layouts, noised alike everywhere."""

from dataclasses import replace

import pytest
import torch

from pretrain.objectives.config import DuoConfig, EsoLMConfig, MDMPrimeConfig, ObjectiveConfig, RePlaidConfig
from pretrain.parallel.config import ParallelConfig
from pretrain.run_config import DurationConfig
from tests.distributed import run_distributed, run_until_killed
from tests.small_run import noised_samples, small_config, train

METHODS = {
    "duo": ObjectiveConfig(name="duo"),
    # The curriculum ends within the run, after the checkpoint.
    "duo-curriculum": ObjectiveConfig(name="duo", duo=DuoConfig(curriculum="topk", top_k=4, curriculum_end=4)),
    "esolm": ObjectiveConfig(name="esolm", esolm=EsoLMConfig(alpha_0=0.5)),
    "replaid": ObjectiveConfig(name="replaid", replaid=RePlaidConfig(latent=8, schedule_hidden=32, prior_ramp_steps=4)),
    "prime": ObjectiveConfig(name="mdm_prime", mdm_prime=MDMPrimeConfig(digits=9)),
}
PAIRS = [
    ("duo", (1, {}), (4, {"tensor": 2, "pipeline": 2})),
    ("duo-curriculum", (2, {"pipeline": 2}), (2, {"zero_stage": 2})),
    ("esolm", (2, {"tensor": 2, "sequence": True}), (4, {"pipeline": 2})),
    ("replaid", (4, {"tensor": 2, "pipeline": 2}), (2, {"zero_stage": 3})),
    ("replaid", (2, {}), (4, {"tensor": 2, "pipeline": 2, "sequence": True, "virtual_pipeline": 2})),
    ("prime", (2, {"zero_stage": 3}), (2, {"tensor": 2})),
]


@pytest.mark.parametrize(
    ("method", "ranks", "sizes"),
    [*((method, 1, {}) for method in METHODS), ("replaid", 4, {"tensor": 2, "pipeline": 2}), ("esolm", 4, {"tensor": 2, "pipeline": 2})],
)
def test_killed_run_resumes_bitwise(tmp_path, method, ranks, sizes):
    """6 steps = 3 steps, kill -9 in the fifth, resume from step 3, through the end of the curriculum where there is one."""
    config = small_config(tmp_path, METHODS[method], parallel=ParallelConfig(**sizes))
    whole = run_distributed(train, ranks, replace(config, name="whole"))
    run_until_killed(train, ranks, config, kill_at=5)
    for before, after in zip(whole, run_distributed(train, ranks, config), strict=True):
        for key in ("seen", "losses", "rates", "norms"):
            assert after[key] == before[key][3:], key
        assert torch.equal(after["weights"], before["weights"])
        assert torch.equal(after["moments"], before["moments"])
        assert torch.equal(after["objective"], before["objective"])


@pytest.mark.parametrize(("method", "first", "second"), PAIRS)
def test_resume_in_another_layout(tmp_path, method, first, second):
    config = small_config(tmp_path, METHODS[method])
    whole = run_distributed(train, 1, replace(config, name="whole"))[0]
    run_distributed(train, first[0], replace(config, duration=DurationConfig(steps=6, stop_after=3), parallel=ParallelConfig(**first[1])))
    resumed = run_distributed(train, second[0], replace(config, parallel=ParallelConfig(**second[1])))[0]
    assert resumed["losses"] == pytest.approx(whole["losses"][3:], rel=1e-5)
    assert resumed["norms"] == pytest.approx(whole["norms"][3:], rel=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_noised_batch_is_bitwise_the_same_in_every_layout(tmp_path, method):
    config = small_config(tmp_path, METHODS[method])
    want = run_distributed(noised_samples, 1, config)[0]
    batch = replace(config.batch, micro_sequences=1)
    held = run_distributed(noised_samples, 4, replace(config, name="laid", batch=batch, parallel=ParallelConfig(tensor=2)))
    assert sorted(want) == list(range(16))
    assert all(want[number] == digest for rank in held for number, digest in rank.items())
    assert sorted(number for rank in held for number in rank) == sorted([*range(16), *range(16)])
