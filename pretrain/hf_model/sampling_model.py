"""A canvas filled in by the sampler that its model and its user choose.

Shape suffixes: B sequences, L positions.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .sampling_ar import sample_ar
from .sampling_draw import TokenLaw
from .sampling_duo import sample_duo, sample_duo_left_to_right
from .sampling_esolm import sample_esolm, sample_esolm_block, sample_esolm_block_autoregressive, sample_esolm_left_to_right
from .sampling_mdlm import sample_first_hitting, sample_mdlm
from .sampling_network import Request
from .sampling_orders import sample_mdlm_in_order
from .sampling_prime import BLANK, sample_prime, sample_prime_left_to_right
from .sampling_psi import Loop, Psi
from .sampling_replaid import sample_replaid

SAMPLERS: dict[str, dict[str, Callable[..., tuple[Tensor, Tensor]]]] = {
    "mdlm": {
        "ancestral": sample_mdlm, "first_hitting": sample_first_hitting,
        **{order: partial(sample_mdlm_in_order, order=order) for order in ("confidence", "margin", "left_to_right")},
    },
    "duo": {"ancestral": sample_duo, "left_to_right": sample_duo_left_to_right},
    "esolm": {
        "ancestral": sample_esolm, "block": sample_esolm_block, "block_autoregressive": sample_esolm_block_autoregressive,
        "left_to_right": sample_esolm_left_to_right,
    },
    "replaid": {solver: partial(sample_replaid, solver=solver) for solver in ("ddpm", "ddim", "dpm++", "heun")},
    "mdm_prime": {"ancestral": sample_prime, "left_to_right": sample_prime_left_to_right},
}  # fmt: skip
"""objective -> name -> sampler; the first is the default. What remains of a sampler's arguments are settings of `LanguageModel.sample`."""

_LAW = ("temperature", "top_k", "top_p")


@dataclass(frozen=True)
class Samples:
    """sequences [B, L]; evaluations [B]: how often the network was asked for each."""

    sequences: Tensor
    evaluations: Tensor


def starting_canvas(model: Any, *, count: int, length: int, prompt: list[int] | Tensor | None) -> Tensor:
    """[count, length]: the prompt, then positions to fill. Raises ValueError for a prompt that leaves none."""
    given = torch.as_tensor([] if prompt is None else prompt, dtype=torch.long)
    if len(given) >= length:
        raise ValueError(f"a prompt of {len(given)} tokens leaves nothing to fill in {length}: give a greater length")
    mask = model.config.mask_token_id
    return torch.cat((given, torch.full((length - len(given),), BLANK if mask is None else mask))).expand(count, -1).clone()


def fill(model: Any, canvas_BL: Tensor, *, seed: int, settings: Mapping[str, Any]) -> Samples:
    """Every blank of the canvas filled in. What `settings` leave out is config.sampling's, as far as the sampler takes it.

    Raises ValueError for a sampler or setting that the objective does not have.
    """
    config, defaults = model.config, dict(model.config.sampling)
    settings = {key: value for key, value in settings.items() if value is not None}
    name = settings.pop("sampler", defaults.pop("sampler", None))
    shape = {key: settings.pop(key, defaults.get(key)) for key in _LAW}
    law = TokenLaw(mask_id=config.mask_token_id, **{key: value for key, value in shape.items() if value is not None})
    progress = {"progress": settings.pop("progress")} if "progress" in settings else {}
    sequences_B = torch.arange(len(canvas_BL), device=canvas_BL.device)
    request = Request(law=law, vocab_size=config.vocab_size, seed=seed, sequences_B=sequences_B, **progress)
    if config.objective == "ar":
        return _continue(model, canvas_BL, request, name, settings)
    known = SAMPLERS[config.objective]
    name = name or next(iter(known))
    if name not in known:
        raise ValueError(f"{config.objective} has no sampler {name!r}; it has {', '.join(known)}")
    takes = inspect.signature(known[name]).parameters
    unknown = sorted(settings.keys() - takes.keys())
    if unknown:
        raise ValueError(f"sampler {name!r} of {config.objective} takes no {', '.join(unknown)}")
    blanks = int((canvas_BL == (BLANK if law.mask_id is None else law.mask_id)).sum(-1).max())
    offered = {"steps": max(blanks, 1), **_learned(model), **defaults, **settings}
    return Samples(*known[name](model.network, canvas_BL, request=request, **_made({key: offered[key] for key in takes if key in offered})))


def _made(settings: dict[str, Any]) -> dict[str, Any]:
    """Psi's settings as the object that they describe: config.json holds plain values."""
    psi = settings.get("psi")
    if isinstance(psi, dict):
        loop = psi.get("loop")
        settings["psi"] = Psi(**{**psi, "loop": Loop(**loop) if isinstance(loop, dict) else loop})
    return settings


def _learned(model: Any) -> dict[str, Any]:
    """Arguments of samplers that the model itself answers."""
    config = model.config
    if config.objective == "replaid":
        return {"space": model.latent_space()}
    if config.objective == "mdm_prime":
        return {"code": model.code}
    return {"schedule_eps": config.schedule_eps} if config.objective == "duo" else {"alpha_0": config.alpha_0}


def _continue(model: Any, canvas_BL: Tensor, request: Request, name: str | None, settings: dict[str, Any]) -> Samples:
    """Autoregression: every document begins after the end of another, here and in training."""
    if name not in (None, "ar"):
        raise ValueError(f"an autoregressive model has no sampler {name!r}; leave it out")
    if settings:
        raise ValueError(f"autoregressive sampling takes no {', '.join(sorted(settings))}")
    blank_BL = canvas_BL == BLANK
    length = int(blank_BL.sum(-1).max())
    if not bool((blank_BL == blank_BL[:1]).all()) or not bool(blank_BL[:, canvas_BL.shape[1] - length :].all()):
        raise ValueError("an autoregressive model continues prompts: what is to be filled must be the end, as long in every sequence")
    start_BP = torch.cat((torch.full_like(canvas_BL[:, :1], model.config.eos_token_id), canvas_BL[:, : canvas_BL.shape[1] - length]), 1)
    ids_BL, evaluations_B = sample_ar(model.network, start_BP, length, request)
    return Samples(ids_BL[:, 1:], evaluations_B)
