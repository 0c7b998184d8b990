"""What an objective has learned or fixed besides its network, as tensors of the exported model, and back.

RePlaid: embeddings (padding rows dropped), and the learned schedule's float64 values as the bits that the exported model's constants keeps.
MDM-Prime-v2: the number that each id is written as.

Shape suffixes: V model vocabulary, P padded vocabulary, E width of an embedding, H hidden units of the schedule.
"""

import torch
from torch import Tensor

from pretrain.objectives.base import Objective
from pretrain.objectives.mdm_prime import MDMPrime
from pretrain.objectives.replaid import RePlaid

DIGIT_CODE, SCHEDULE_BITS, EMBEDDING = "constants.digit_code", "constants.schedule_bits", "embedding.weight"
_INTERIOR = ("slope", "shift", "height")


def parts_of(objective: Objective) -> dict[str, Tensor]:
    """Name in the exported model -> tensor; int64 ones first, then fp32."""
    if isinstance(objective, MDMPrime):
        return {DIGIT_CODE: torch.from_numpy(objective.code.codes_V).long()}
    if not isinstance(objective, RePlaid):
        return {}
    schedule = objective.schedule
    interior = [getattr(schedule.interior, name).detach() for name in _INTERIOR]
    values = torch.cat([torch.stack((schedule.gamma_0.detach(), schedule.gamma_1.detach())), *interior])
    rows_VE = objective.embedding.weight.detach()[: objective.vocabulary.model_size]
    return {SCHEDULE_BITS: values.double().cpu().view(torch.int64), EMBEDDING: rows_VE.float().cpu()}


@torch.no_grad()
def fill_objective(objective: Objective, parts: dict[str, Tensor], *, output_prior: float) -> None:
    """The inverse, into a fresh objective. Raises ValueError for parts that do not fit it.

    output_prior  how far the output prior had grown, which RePlaid keeps as steps of its ramp.
    """
    if isinstance(objective, MDMPrime) and not torch.equal(parts[DIGIT_CODE], torch.from_numpy(objective.code.codes_V).long()):
        raise ValueError("the digit code is not the one that shuffle_seed, base and digits make")
    if not isinstance(objective, RePlaid):
        return
    hidden = objective.config.schedule_hidden
    values, rows_VE = parts[SCHEDULE_BITS].view(torch.float64), parts[EMBEDDING]
    if len(values) != 2 + 3 * hidden or tuple(rows_VE.shape) != (objective.vocabulary.model_size, objective.config.latent):
        raise ValueError(f"the schedule has {len(values)} values and the embedding shape {tuple(rows_VE.shape)}, which are not those of config.json")
    ends, *interior = values.split((2, hidden, hidden, hidden))
    objective.schedule.gamma_0.copy_(ends[0])
    objective.schedule.gamma_1.copy_(ends[1])
    for name, value in zip(_INTERIOR, interior, strict=True):
        getattr(objective.schedule.interior, name).copy_(value)
    objective.embedding.weight[: len(rows_VE)].copy_(rows_VE)
    objective.running.steps.fill_(round(output_prior * objective.config.prior_ramp_steps))
