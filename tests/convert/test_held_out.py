"""A checkpoint scored by the plain network against what training's own validation logged for it, and RePlaid's ODE beside its bound."""

import math
from dataclasses import replace

import pytest
import torch

from pretrain.convert.held_out import HeldOut
from pretrain.convert.plain_network import open_trained
from pretrain.engine.config import ScheduleConfig
from pretrain.errors import UserError
from pretrain.evaluation.config import EvaluationConfig
from pretrain.objectives.config import DuoConfig, EsoLMConfig, MDMPrimeConfig, ObjectiveConfig, RePlaidConfig
from pretrain.run_config import ValidationConfig
from pretrain.telemetry.log import read_log
from tests.distributed import run_distributed
from tests.small_run import small_config, train

OBJECTIVES = {
    "ar": ObjectiveConfig(name="ar"),
    "duo-curriculum": ObjectiveConfig(name="duo", duo=DuoConfig(curriculum="topk", top_k=4)),
    "esolm-mixed": ObjectiveConfig(name="esolm", esolm=EsoLMConfig(alpha_0=0.5)),
    "esolm-orders": ObjectiveConfig(name="esolm", esolm=EsoLMConfig(evaluate="any_order", orders=2)),
    "replaid": ObjectiveConfig(name="replaid", replaid=RePlaidConfig(latent=8, schedule_hidden=16, prior_ramp_steps=4)),
    "prime": ObjectiveConfig(name="mdm_prime", mdm_prime=MDMPrimeConfig(digits=9)),
}


def ignore(_: int) -> None:
    pass


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_plain_network_repeats_the_validation(tmp_path, name):
    draws = 1 if name == "ar" else 2
    config = small_config(tmp_path, OBJECTIVES[name], validation=ValidationConfig(every=0, draws=draws))
    run_distributed(train, 1, config)
    logged = [record for record in read_log(config.directory / "log.jsonl") if record["kind"] == "validation"][-1]
    trained = open_trained(config.directory)
    held_out = HeldOut(trained, EvaluationConfig(checkpoint=str(config.directory), draws=draws, batch=3), torch.device("cpu"))
    found = held_out.nelbo(ignore)
    assert found.nats_per_token == pytest.approx(logged["nelbo_nats_per_token"], rel=1e-5)
    assert (found.label, found.tokens, found.sequences) == (logged["nelbo_label"], logged["validation_tokens"], logged["validation_sequences"])
    few = HeldOut(trained, EvaluationConfig(checkpoint=str(config.directory), sequences=2), torch.device("cpu"))
    assert few.nelbo(ignore).sequences == 2
    if name != "replaid":
        with pytest.raises(UserError, match="likelihood=ode is RePlaid's"):
            few.ode(ignore)


def test_the_ode_of_an_exact_denoiser(tmp_path):
    """Zero logits and the whole output prior are the exact posterior of ids drawn uniformly: every text then has log K per token, and the
    bound lies above it."""
    objective = ObjectiveConfig(name="replaid", replaid=RePlaidConfig(latent=8, schedule_hidden=16, prior_ramp_steps=0))
    still = ScheduleConfig(kind="constant", peak=1e-12, warmup_steps=0)
    run_distributed(train, 1, small_config(tmp_path, objective, schedule=still, validation=ValidationConfig(every=0, draws=8)))
    trained = open_trained(tmp_path / "runs" / "small")
    config = EvaluationConfig(checkpoint="", ode_steps=48, ode_samples=4, sequences=8)
    ode = HeldOut(trained, config, torch.device("cpu")).ode(ignore)
    bound = HeldOut(trained, replace(config, draws=64), torch.device("cpu")).nelbo(ignore)
    log_k = math.log(trained.vocabulary.model_size - 1)  # the mask is never predicted
    # One random probe per trace leaves a percent; the pieces are held to 1e-8 in test_replaid_exactness and test_ode_likelihood.
    assert (ode.label, ode.nats_per_token) == ("estimate", pytest.approx(log_k, rel=0.02))
    assert log_k < bound.nats_per_token < 1.2 * log_k
