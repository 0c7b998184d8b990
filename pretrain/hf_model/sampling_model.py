"""A canvas filled in by the sampler that its model and its user choose. Which samplers there are, and what they take: sampling_settings.py.

Shape suffixes: B sequences, L positions.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .sampling_draw import TokenLaw
from .sampling_methods import Constants, Method
from .sampling_methods import fill as fill_alike
from .sampling_network import BLANK, Request
from .sampling_settings import SAMPLERS, choose_sampler

_LAW = ("temperature", "top_k", "top_p")
_CALLS = ("progress", "watch")


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

    settings  sampler, temperature, top_k, top_p, the sampler's own, and the callbacks progress and watch of a `Request`.

    Raises ValueError for a sampler or setting that the objective does not have.
    """
    config, defaults = model.config, dict(model.config.sampling)
    chosen = {key: value for key, value in settings.items() if value is not None}
    sampler = choose_sampler(config.objective, chosen.pop("sampler", defaults.pop("sampler", "auto")))
    shape = {key: chosen.pop(key, defaults.get(key)) for key in _LAW}
    calls = {key: chosen.pop(key) for key in _CALLS if key in chosen}
    own = {key: value for key, value in defaults.items() if key in SAMPLERS[config.objective][sampler]}
    method = Method.of(config.objective, sampler, own | chosen)
    law = TokenLaw(mask_id=config.mask_token_id, **{key: value for key, value in shape.items() if value is not None})
    blank_BL = canvas_BL == (BLANK if law.mask_id is None else law.mask_id)
    open_BL, start = canvas_BL.masked_fill(blank_BL, BLANK), 0
    if config.objective == "ar":  # every document begins after the end of another, here and in training
        open_BL, start = torch.cat((torch.full_like(open_BL[:, :1], config.eos_token_id), open_BL), 1), 1
    constants, filled_BL = constants_of(model), canvas_BL.clone()
    evaluations_B, counts_B = torch.zeros(len(canvas_BL), dtype=torch.long, device=canvas_BL.device), blank_BL.sum(-1)
    for count in counts_B.unique().tolist():
        rows_R = (counts_B == count).nonzero()[:, 0]
        request = Request(law=law, vocab_size=config.vocab_size, seed=seed, sequences_B=rows_R, **calls)
        if count:
            ids_RL, evaluations_B[rows_R] = fill_alike(model.network, open_BL[rows_R], request, constants, method)
            filled_BL[rows_R] = ids_RL[:, start:]
    return Samples(filled_BL, evaluations_B)


def constants_of(model: Any) -> Constants:
    """What a sampler must know of the model besides its network."""
    config = model.config
    digits = config.objective == "mdm_prime"
    return Constants(
        objective=config.objective,
        schedule_eps=config.schedule_eps,
        alpha_0=config.alpha_0,
        code=model.code if digits else None,
        joint_above=config.sampling.get("joint_above") if digits else None,
        space=model.latent_space() if config.objective == "replaid" else None,
    )
