"""One way to run every sampler of every objective: a canvas with blanks in, text out.

Shape suffixes: B sequences, L positions.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from .digits import DigitCode
from .sampling_ar import continue_texts
from .sampling_duo import sample_duo, sample_duo_left_to_right
from .sampling_esolm import sample_esolm, sample_esolm_block, sample_esolm_block_autoregressive, sample_esolm_left_to_right
from .sampling_mdlm import sample_first_hitting, sample_mdlm
from .sampling_network import BLANK, CausalDenoiser, Request
from .sampling_orders import sample_mdlm_in_order
from .sampling_prime import sample_prime, sample_prime_left_to_right
from .sampling_psi import Loop, Psi
from .sampling_remask import sample_mdlm_psi
from .sampling_replaid import LatentSpace, sample_replaid, sample_replaid_left_to_right
from .sampling_settings import SettingsError, choose_sampler, complete_settings

Result = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Constants:
    """What a sampler must know of a trained model besides its network.

    objective     ar, mdlm, duo, esolm, replaid or mdm_prime.
    schedule_eps  e of the schedule that Duo's network was trained with.
    alpha_0       Eso-LM's share of diffusion in training.
    code          MDM-Prime's digits.
    joint_above   the t above which MDM-Prime's training masked a token's digits together; None: nowhere.
    space         RePlaid's embeddings and schedule.
    """

    objective: str
    schedule_eps: float = 1e-3
    alpha_0: float = 1.0
    code: DigitCode | None = None
    joint_above: float | None = None
    space: LatentSpace | None = None


@dataclass(frozen=True, kw_only=True)
class Method:
    """A sampler of an objective, with all of its settings."""

    objective: str
    sampler: str
    settings: Mapping[str, Any]

    @classmethod
    def of(cls, objective: str, sampler: str = "auto", given: Mapping[str, Any] | None = None) -> "Method":
        """The sampler of that name with the settings `given` (None: not given). Raises SettingsError for what does not fit together."""
        name = choose_sampler(objective, sampler)
        method = cls(objective=objective, sampler=name, settings=complete_settings(objective, name, given or {}))
        if name == "psi":
            try:
                method.psi().steps(method.settings["steps"] or 1000)
            except ValueError as error:
                raise SettingsError(str(error)) from error
        return method

    def psi(self) -> Psi:
        """The member of the psi family. Raises ValueError where its settings contradict each other."""
        chosen = self.settings
        loop = Loop(alpha=chosen["loop_alpha"], rise=chosen["loop_rise"], fall=chosen["loop_fall"]) if chosen["loop"] else None
        return Psi(mode=chosen["psi"], eta=chosen["eta"], loop=loop)


def fill(network: CausalDenoiser, canvas_BL: Tensor, request: Request, constants: Constants, method: Method) -> Result:
    """Every BLANK of canvas_BL filled by `method`; what else stands there is given.

    Where a sampler takes steps and none are set, there is one per blank, and all sequences have as many blanks; for AR the blanks come last, after
    at least one token. The request's law carries the model's mask id, if it has one. Returns ids [B, L] and the network evaluations of each
    sequence [B]. Raises ValueError where this does not hold, SettingsError where the model lacks what a setting asks for.
    """
    blank_BL = canvas_BL == BLANK
    counts_B = blank_BL.sum(-1)
    if alike_only(method) and (counts_B != counts_B[0]).any():
        raise ValueError(f"sequences with {counts_B.unique().tolist()} blanks cannot share a batch")
    run = {"ar": _ar, "mdlm": _mdlm, "duo": _duo, "esolm": _esolm, "replaid": _replaid, "mdm_prime": _prime}[constants.objective]
    steps = method.settings.get("steps") or int(counts_B[0])
    if method.settings.get("loop"):
        steps = max(steps, 3)
    if request.law.mask_id is not None:
        canvas_BL = canvas_BL.masked_fill(blank_BL, request.law.mask_id)
    return run(network, canvas_BL, max(steps, 1), request, constants, method)


def alike_only(method: Method) -> bool:
    """Whether the sequences of a batch must have the same number of blanks, since it says how many steps are taken."""
    return "steps" in method.settings and method.settings["steps"] is None


def _ar(network: CausalDenoiser, canvas_BL: Tensor, steps: int, request: Request, constants: Constants, method: Method) -> Result:
    return continue_texts(network, canvas_BL, request)


def _mdlm(network: CausalDenoiser, canvas_BL: Tensor, steps: int, request: Request, constants: Constants, method: Method) -> Result:
    chosen = method.settings
    match method.sampler:
        case "ancestral":
            return sample_mdlm(network, canvas_BL, steps, request, noise_removal=chosen["noise_removal"])
        case "psi":
            return sample_mdlm_psi(network, canvas_BL, steps, request, psi=method.psi(), noise_removal=chosen["noise_removal"])
        case "first_hitting":
            return sample_first_hitting(network, canvas_BL, request)
        case order:
            return sample_mdlm_in_order(network, canvas_BL, request, order=order, **chosen)  # type: ignore[arg-type]


def _duo(network: CausalDenoiser, canvas_BL: Tensor, steps: int, request: Request, constants: Constants, method: Method) -> Result:
    if method.sampler == "left_to_right":
        return sample_duo_left_to_right(network, canvas_BL, request, schedule_eps=constants.schedule_eps, **method.settings)
    psi = method.psi() if method.sampler == "psi" else Psi()
    noise_removal = method.settings["noise_removal"]
    return sample_duo(network, canvas_BL, steps, request, psi=psi, noise_removal=noise_removal, schedule_eps=constants.schedule_eps)


def _esolm(network: CausalDenoiser, canvas_BL: Tensor, steps: int, request: Request, constants: Constants, method: Method) -> Result:
    chosen = {name: value for name, value in method.settings.items() if name != "steps"}
    match method.sampler:
        case "ancestral":
            alpha_0 = constants.alpha_0 if chosen["alpha_0"] is None else chosen["alpha_0"]
            return sample_esolm(network, canvas_BL, steps, request, alpha_0=alpha_0, given=chosen["given"])
        case "block":
            return sample_esolm_block(network, canvas_BL, steps, request, **chosen)
        case "block_autoregressive":
            return sample_esolm_block_autoregressive(network, canvas_BL, steps, request, **chosen)
        case _:
            return sample_esolm_left_to_right(network, canvas_BL, request, **chosen)


def _replaid(network: CausalDenoiser, canvas_BL: Tensor, steps: int, request: Request, constants: Constants, method: Method) -> Result:
    space = constants.space
    if space is None:
        raise ValueError("RePlaid is sampled in the space of its embeddings")
    if method.sampler == "left_to_right":
        return sample_replaid_left_to_right(network, canvas_BL, request, space=space)
    wanted = method.settings["self_conditioning"]
    if wanted and not space.self_conditioning:
        raise SettingsError("self_conditioning=true needs a network that was trained to read its estimate, and this one was not; leave it out")
    if wanted is not None:
        space = replace(space, self_conditioning=wanted)
    temperature = method.settings["score_temperature"]
    return sample_replaid(network, canvas_BL, steps, request, space=space, solver=method.sampler, score_temperature=temperature)  # type: ignore[arg-type]


def _prime(network: CausalDenoiser, canvas_BL: Tensor, steps: int, request: Request, constants: Constants, method: Method) -> Result:
    if constants.code is None:
        raise ValueError("MDM-Prime is sampled digit by digit, in the code of its training")
    if method.sampler == "left_to_right":
        return sample_prime_left_to_right(network, canvas_BL, request, code=constants.code)
    wanted = method.settings["joint_above"]
    joint_above = constants.joint_above if wanted is None else wanted
    return sample_prime(network, canvas_BL, steps, request, code=constants.code, joint_above=joint_above)
