"""The objective's own optimizer against AdamW by hand: rates of its own, clips apart, and which norm counts."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from pretrain.engine.config import OptimizerConfig
from pretrain.engine.optimizer import ObjectiveOptimizer

ALONE = SimpleNamespace(pipeline=SimpleNamespace(size=1), data=SimpleNamespace(size=1), tensor=SimpleNamespace(size=1))


def parameters() -> nn.ParameterDict:
    own = nn.ParameterDict({name: nn.Parameter(torch.tensor([1.0, -2.0])) for name in ("plain", "fast", "apart")})
    own["fast"].learning_rate = 0.5
    own["fast"].weight_decay = 0.1
    own["apart"].clip_apart = True
    for name, gradient in {"plain": [3.0, 0.0], "fast": [0.0, 4.0], "apart": [600.0, 800.0]}.items():
        own[name].grad = torch.tensor(gradient)
    return own


def test_norms_of_the_model_and_of_what_is_apart() -> None:
    own = parameters()
    optimizer = ObjectiveOptimizer(nn.ModuleDict({"own": own}), OptimizerConfig(), ALONE)  # type: ignore[arg-type]
    assert optimizer.reduce() == pytest.approx((25.0, 1e6))


def test_rates_follow_the_schedule_from_their_own_peak() -> None:
    """At half the run's peak every rate is halved; gradients are scaled by the clip that is theirs; only `fast` decays."""
    own, config = parameters(), OptimizerConfig(beta1=0.8, beta2=0.9, eps=1.0)
    optimizer = ObjectiveOptimizer(nn.ModuleDict({"own": own}), config, ALONE)  # type: ignore[arg-type]
    optimizer.step(0.01, 0.2, 0.001, peak=0.02)
    expected = {}
    for name, rate, scale, decay in (("plain", 0.01, 0.2, 0.0), ("fast", 0.25, 0.2, 0.1), ("apart", 0.01, 0.001, 0.0)):
        gradient = torch.tensor({"plain": [3.0, 0.0], "fast": [0.0, 4.0], "apart": [600.0, 800.0]}[name]) * scale
        start = torch.tensor([1.0, -2.0])
        expected[name] = start * (1 - rate * decay) - rate * gradient / (gradient.abs() + 1.0)  # the first step: m / bias = g, v / bias = g^2
    for name, value in expected.items():
        torch.testing.assert_close(own[name].detach(), value)
        assert own[name].grad is None
