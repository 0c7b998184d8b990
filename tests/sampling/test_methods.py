"""From a method's settings to the arguments of its sampler."""

from typing import Any

import pytest
import torch
from torch import Tensor

from pretrain.hf_model import sampling_methods
from pretrain.hf_model.digits import DigitCode
from pretrain.hf_model.sampling_draw import TokenLaw
from pretrain.hf_model.sampling_methods import Constants, Method, fill
from pretrain.hf_model.sampling_network import BLANK, Request
from pretrain.hf_model.sampling_psi import Loop, Psi
from pretrain.hf_model.sampling_replaid import LatentSpace
from pretrain.hf_model.sampling_settings import SAMPLERS, SettingsError

MASK = 9
CODE = DigitCode(9, base=2, digits=4, shuffle_seed=0)
SPACE = LatentSpace(table_VE=torch.zeros(10, 2), gamma=lambda t: t)
UNCONDITIONED = LatentSpace(table_VE=SPACE.table_VE, gamma=SPACE.gamma, self_conditioning=False)
CONSTANTS = {
    "ar": Constants(objective="ar"),
    "mdlm": Constants(objective="mdlm"),
    "duo": Constants(objective="duo", schedule_eps=0.02),
    "esolm": Constants(objective="esolm", alpha_0=0.3),
    "replaid": Constants(objective="replaid", space=SPACE),
    "mdm_prime": Constants(objective="mdm_prime", code=CODE, joint_above=0.5),
}
CAPPED = Psi(mode="max_capped", eta=0.01)
LOOP = Psi(mode="remdm", eta=0.2, loop=Loop(alpha=0.8, rise=0.4, fall=0.1))
LOOP_SETTINGS = {"psi": "remdm", "eta": 0.2, "loop": True, "loop_alpha": 0.8, "loop_rise": 0.4, "loop_fall": 0.1}
SENT: list[tuple[str, str, dict[str, Any], str, dict[str, Any]]] = [
    ("ar", "ar", {}, "continue_texts", {}),
    ("mdlm", "ancestral", {}, "sample_mdlm", {"steps": 4, "noise_removal": "ancestral"}),
    ("mdlm", "ancestral", {"steps": 2, "noise_removal": "greedy"}, "sample_mdlm", {"steps": 2, "noise_removal": "greedy"}),
    ("mdlm", "first_hitting", {}, "sample_first_hitting", {}),
    ("mdlm", "confidence", {"block": 2}, "sample_mdlm_in_order", {"order": "confidence", "tokens": 1, "block": 2}),
    ("mdlm", "margin", {"tokens": 3}, "sample_mdlm_in_order", {"order": "margin", "tokens": 3, "block": None}),
    ("mdlm", "left_to_right", {"tokens": 2}, "sample_mdlm_in_order", {"order": "left_to_right", "tokens": 2}),
    ("mdlm", "psi", {}, "sample_mdlm_psi", {"steps": 4, "psi": CAPPED, "noise_removal": "ancestral"}),
    ("mdlm", "psi", LOOP_SETTINGS | {"steps": 7}, "sample_mdlm_psi", {"steps": 7, "psi": LOOP, "noise_removal": "ancestral"}),
    ("duo", "ancestral", {"noise_removal": "greedy"}, "sample_duo", {"steps": 4, "psi": Psi(), "noise_removal": "greedy", "schedule_eps": 0.02}),
    ("duo", "psi", LOOP_SETTINGS, "sample_duo", {"steps": 4, "psi": LOOP, "noise_removal": "ancestral", "schedule_eps": 0.02}),
    ("duo", "left_to_right", {}, "sample_duo_left_to_right", {"schedule_eps": 0.02, "clean_share": "all"}),
    ("esolm", "ancestral", {}, "sample_esolm", {"steps": 4, "alpha_0": 0.3, "given": "natural"}),
    ("esolm", "ancestral", {"alpha_0": 0.0, "given": "shuffled"}, "sample_esolm", {"steps": 4, "alpha_0": 0.0, "given": "shuffled"}),
    ("esolm", "block", {"order": "shuffled"}, "sample_esolm_block", {"steps": 4, "order": "shuffled", "given": "natural"}),
    ("esolm", "block_autoregressive", {"segments": 2}, "sample_esolm_block_autoregressive",
     {"steps": 4, "segments": 2, "order": "natural", "given": "natural"}),
    ("esolm", "left_to_right", {}, "sample_esolm_left_to_right", {"given": "natural"}),
    *[("replaid", solver, {}, "sample_replaid", {"steps": 4, "solver": solver, "space": SPACE, "score_temperature": 1.0})
      for solver in ("ddpm", "ddim", "dpm++", "heun")],
    ("replaid", "heun", {"score_temperature": 0.5, "steps": 9}, "sample_replaid",
     {"steps": 9, "solver": "heun", "space": SPACE, "score_temperature": 0.5}),
    ("replaid", "ddpm", {"self_conditioning": False}, "sample_replaid",
     {"steps": 4, "solver": "ddpm", "space": UNCONDITIONED, "score_temperature": 1.0}),
    ("replaid", "left_to_right", {}, "sample_replaid_left_to_right", {"space": SPACE}),
    ("mdm_prime", "ancestral", {}, "sample_prime", {"steps": 4, "code": CODE, "joint_above": 0.5}),
    ("mdm_prime", "ancestral", {"joint_above": 0.0}, "sample_prime", {"steps": 4, "code": CODE, "joint_above": 0.0}),
    ("mdm_prime", "left_to_right", {}, "sample_prime_left_to_right", {"code": CODE}),
]  # fmt: skip


def request(objective: str, count: int = 2) -> Request:
    law = TokenLaw(mask_id=None if objective in ("ar", "mdm_prime") else MASK)
    return Request(law=law, vocab_size=10, seed=1, sequences_B=torch.arange(count))


def canvas(objective: str) -> Tensor:
    row = [1, 2, BLANK, BLANK, BLANK, BLANK] if objective == "ar" else [1, BLANK, 2, BLANK, BLANK, BLANK]
    return torch.tensor([row, row])


@pytest.mark.parametrize(("objective", "sampler", "given", "function", "expected"), SENT)
def test_arguments(
    monkeypatch: pytest.MonkeyPatch, objective: str, sampler: str, given: dict[str, Any], function: str, expected: dict[str, Any]
) -> None:
    sent: list[Any] = []

    def record(network: Any, ids_BL: Tensor, *numbers: Any, **named: Any) -> str:
        sent.extend((network, ids_BL, numbers, named))
        return "result"

    monkeypatch.setattr(sampling_methods, function, record)
    asked, network = request(objective), object()
    method = Method.of(objective, sampler, given)
    result: Any = fill(network, canvas(objective), asked, CONSTANTS[objective], method)  # type: ignore[arg-type]
    assert result == "result" and sent[0] is network
    masked = canvas(objective) if objective in ("ar", "mdm_prime") else canvas(objective).where(canvas(objective) != BLANK, MASK)
    assert torch.equal(sent[1], masked)
    positional = [expected[name] for name in ("steps",) if name in expected]
    assert list(sent[2]) == [*positional, asked]
    assert sent[3] == {name: value for name, value in expected.items() if name != "steps"}


def test_every_sampler_is_sent_somewhere() -> None:
    assert {(objective, sampler) for objective, sampler, *_ in SENT} == {(name, one) for name, samplers in SAMPLERS.items() for one in samplers}


def test_what_a_batch_must_hold() -> None:
    ragged = torch.tensor([[1, BLANK, BLANK], [1, 2, BLANK]])
    with pytest.raises(ValueError, match=r"sequences with \[1, 2\] blanks cannot share a batch"):
        fill(object(), ragged, request("mdlm"), CONSTANTS["mdlm"], Method.of("mdlm"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="blanks come last"):
        fill(object(), torch.tensor([[1, BLANK], [BLANK, 1]]), request("ar"), CONSTANTS["ar"], Method.of("ar"))  # type: ignore[arg-type]
    for objective in ("replaid", "mdm_prime"):
        with pytest.raises(ValueError, match="is sampled"):
            fill(object(), canvas(objective), request(objective), Constants(objective=objective), Method.of(objective))  # type: ignore[arg-type]
    without = Constants(objective="replaid", space=UNCONDITIONED)
    with pytest.raises(SettingsError, match="this one was not; leave it out"):
        fill(object(), canvas("replaid"), request("replaid"), without, Method.of("replaid", given={"self_conditioning": True}))  # type: ignore[arg-type]
