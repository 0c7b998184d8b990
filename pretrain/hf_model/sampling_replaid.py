"""Sampling from Gaussian diffusion over token embeddings (RePlaid, Yang et al. 2026; Plaid, Gulrajani and Hashimoto 2023).

Standard normal latents at t = 1 go down an even grid to exactly t = 0 by one of four kinds of steps (gaussian_solvers.py), and one more
evaluation there takes the most likely token. (Plaid's code steps on a grid of spacing 1/(T-1) by 1/T.) The latents and everything from the logits on
are float64; the network reads them as in training: scaled to mean square 1, with gamma, and with its previous estimate of the clean embeddings.

x_theta = softmax(logits + evidence), the evidence being what z_t itself says of each token. Temperature, top-k and nucleus shape x_theta
before its mean embedding e_hat enters a step; the score temperature acts on e_hat (`sharpened`). What is fed back as estimate is e_hat
without either, zero before the first evaluation: the network has learned from its own output.

The mask id marks the positions to fill, and nothing else: x_theta never predicts it. At every step a prompt's latents are its embeddings
without noise, and so is its estimate once there is one. The network says nothing of them that a sampler would need.

Time conditioning changes the network's output at every step: every sequence with a mask costs an evaluation per step (heun: two), and one at
the end.

Shape suffixes: B sequences, L positions, R sequences with something to fill, N positions to fill, E width of an embedding, D features, V vocabulary.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .gaussian_diffusion import UnitEmbedding, evidence_scale, network_scale
from .gaussian_solvers import Solver, estimates_per_step, reverse_steps, sharpened
from .monotone_schedule import LearnedSchedule
from .network_input import Attention, NetworkInput
from .sampling_draw import TokenLaw, inverse_cdf, rows_at_once
from .sampling_network import Denoiser, Request, SamplingError, after_end, blanks
from .sampling_noise import normals, uniforms

LARGEST = 100.0
"""Root mean square of a position's latents at t = 0, in units of what training showed the network, from which on they have run away."""


@dataclass(frozen=True, kw_only=True)
class LatentSpace:
    """What a trained objective knows besides its network.

    table_VE           the embedding of every id of the model vocabulary, of length 1; float64.
    gamma              t in [0, 1], float64, to the log noise-to-signal ratio there, increasing; any number of times at once.
    evidence           how much of the evidence of z_t is added to the logits: 1, or 0 for a network trained without; between them while it grew.
    self_conditioning  whether the network was trained to read its previous estimate.
    prompt_table       whether the network reads prompts from a table of their own, and not their clean embeddings.
    """

    table_VE: Tensor
    gamma: Callable[[Tensor], Tensor]
    evidence: float = 1.0
    self_conditioning: bool = True
    prompt_table: bool = False

    @classmethod
    @torch.no_grad()
    def of(
        cls, embedding: UnitEmbedding, schedule: LearnedSchedule, vocab_size: int, *, evidence: float = 1.0, self_conditioning: bool = True,
        prompt_table: bool = False,
    ) -> "LatentSpace":  # fmt: skip
        """From the objective's modules; rows from vocab_size on are padding."""
        table_VE = embedding(0, vocab_size).double()
        return cls(
            table_VE=table_VE, gamma=lambda t: schedule(t)[0], evidence=evidence, self_conditioning=self_conditioning, prompt_table=prompt_table
        )

    def levels(self, steps: int, device: torch.device) -> Tensor:
        """gamma at t = 1, 1 - 1/steps, …, 0. Raises ValueError for too few steps."""
        if steps < 1:
            raise ValueError(f"needs at least 1 step, got {steps}")
        return self.gamma(torch.arange(steps, -1, -1, dtype=torch.float64, device=device) / steps)


@torch.no_grad()
def sample_replaid(
    network: Denoiser,
    ids_BL: Tensor,
    steps: int,
    request: Request,
    *,
    space: LatentSpace,
    solver: Solver = "ddpm",
    score_temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Fill every mask of ids_BL by `steps` reverse steps from t = 1 to t = 0 and the most likely token there.

    solver             ddpm, which is best with many steps; ddim, dpm++ or heun, deterministic from the first latents on and better with few.
    score_temperature  divides the predicted noise; 1 leaves it. The smaller, the more steps it takes.

    Returns ids [B, L] and the network evaluations of each sequence [B]. Raises ValueError for too few steps, an unknown solver, and a score
    temperature that is not positive; SamplingError for one that is too small for the steps.
    """
    if not score_temperature > 0:
        raise ValueError(f"the score temperature divides and must be above 0, got {score_temperature}")
    ids_BL, blank_BL = ids_BL.clone(), blanks(ids_BL, request.law)
    active_B, gammas = blank_BL.any(-1), space.levels(steps, ids_BL.device)
    evaluations = steps * estimates_per_step(solver) + 1
    if active_B.any():
        reader = _Reader(network, ids_BL[active_B], space, request)
        way = _walk(reader, gammas, solver, score_temperature, request.seed, request.sequences_B.to(ids_BL.device)[active_B])
        total, shown = int(blank_BL.sum()), 0
        for number, z_NE in enumerate(way, start=1):
            # No token is final before the end: what is shown is the share of the steps.
            done, last = total * number // (steps + 1), z_NE
            request.progress(done - shown)
            shown = done
            if reader.guess_N is not None:
                request.show(ids_BL.masked_scatter(blank_BL, reader.guess_N))
        _check_latents(last, gammas[-1], score_temperature, steps)
        ids_BL[blank_BL] = reader.most_likely(last, gammas[-1])
        request.progress(total - shown)
        request.show(ids_BL)
    request.check(ids_BL)
    return ids_BL, active_B.long() * evaluations


@torch.no_grad()
def sample_replaid_left_to_right(network: Denoiser, ids_BL: Tensor, request: Request, *, space: LatentSpace) -> tuple[Tensor, Tensor]:
    """Fill the masks of ids_BL one at a time, from left to right, each in one evaluation of the whole sequence, until the request's `end`.

    What is known, prompt or drawn, stands without noise as a prompt does; everything else is noise of t = 1, drawn afresh for every evaluation,
    and the network is told gamma(1). Latents of t = 1 say as good as nothing (SNR = exp(-gamma(1))), so x_theta at the next position is its law
    given what is known, and the token is drawn from it; an exact x_theta gives the data's law up to that SNR. The process itself has no such order:
    all its positions share one t, and training shows known positions in prompts only. So a trained network is asked for something new here: it
    shows how RePlaid compares on equal terms, and its own samplers show what it can do.

    There is no earlier estimate to feed back: each evaluation is a first one. Results as in `sample_replaid`.
    """
    first_BL = blank_BL = blanks(ids_BL, request.law)
    ids_BL, sequences_B = ids_BL.clone(), request.sequences_B.to(ids_BL.device)
    evaluations_B, gamma = torch.zeros(len(ids_BL), dtype=torch.long, device=ids_BL.device), space.levels(1, ids_BL.device)[0]
    positions_L, width = torch.arange(ids_BL.shape[1], device=ids_BL.device), space.table_VE.shape[1]
    uniform_BL = uniforms(request.seed, sequences_B, ids_BL.shape[1], positions_L)[0]  # a step that no turn's normals are of
    for turn in range(int(blank_BL.sum(-1).max())):
        next_BL = blank_BL & (blank_BL.cumsum(-1) == 1)
        active_B = blank_BL.any(-1)
        reader = _Reader(network, ids_BL[active_B], space, request)
        z_NE = normals(request.seed, sequences_B[active_B], turn, positions_L, width)[reader.blank_RL]
        ids_BL[next_BL] = reader.draw(z_NE, gamma, next_BL[active_B][reader.blank_RL], uniform_BL[next_BL])
        evaluations_B += active_B
        over_BL = after_end(ids_BL, first_BL, request.end) & blank_BL & ~next_BL
        ids_BL = ids_BL if request.end is None else ids_BL.masked_fill(over_BL, request.end)
        blank_BL = blank_BL & ~next_BL & ~over_BL
        request.progress(int((next_BL | over_BL).sum()))
        request.show(ids_BL)
        if not blank_BL.any():
            break
    request.check(ids_BL)
    return ids_BL, evaluations_B


def _walk(reader: "_Reader", gammas: Tensor, solver: Solver, score_temperature: float, seed: int, sequences_R: Tensor) -> Iterator[Tensor]:
    """The latents [N, E] after each step. Step 0's normals are the latents at t = 1."""
    blank_RL, width = reader.blank_RL, reader.space.table_VE.shape[1]
    positions_L = torch.arange(blank_RL.shape[1], device=blank_RL.device)

    def noise(step: int) -> Tensor:
        return normals(seed, sequences_R, step, positions_L, width)[blank_RL]

    def denoise(z_NE: Tensor, gamma: Tensor) -> Tensor:
        return sharpened(z_NE, reader.mean_embedding(z_NE, gamma), gamma, score_temperature)

    return reverse_steps(denoise, noise(0), gammas, solver, noise)


def _check_latents(z_NE: Tensor, gamma: Tensor, score_temperature: float, steps: int) -> None:
    """Raise SamplingError where a score temperature below 1 made steps overshoot until the latents meant nothing any more."""
    size_N = (network_scale(gamma, z_NE.shape[-1]) * z_NE).square().mean(-1).sqrt()
    if score_temperature < 1 and not (size_N < LARGEST).all():
        raise SamplingError(f"score temperature {score_temperature} is too small for {steps} steps, and the latents ran away: raise one of them")


class _Reader:
    """Evaluates the network, and remembers what it said last: the state of self-conditioning.

    guess_N  the most likely tokens of the last step, where somebody watches.
    """

    def __init__(self, network: Denoiser, ids_RL: Tensor, space: LatentSpace, request: Request) -> None:
        self.network, self.space, self.law = network, space, request.law
        self.guess_N: Tensor | None = None
        self._watched = request.watch is not None
        self.blank_RL = blanks(ids_RL, request.law)
        self._ids_RL = ids_RL
        self._clean_RLE = space.table_VE[ids_RL]
        self._estimate_RLE = torch.zeros_like(self._clean_RLE)

    def mean_embedding(self, z_NE: Tensor, gamma: Tensor) -> Tensor:
        """[N, E]: e_hat at the positions to fill, as the law's options shape it; the plain one is kept for the next evaluation."""
        shaped, plain, guesses = [], [], []
        plain_law = TokenLaw(mask_id=self.law.mask_id)
        for logits_NV in self._logits(z_NE, gamma):
            p_NV = plain_law.probabilities(logits_NV)
            plain.append(p_NV @ self.space.table_VE)
            if self._watched:
                guesses.append(p_NV.argmax(-1))
            shaped.append(plain[-1] if plain_law == self.law else self.law.probabilities(logits_NV) @ self.space.table_VE)
        if self._watched:
            self.guess_N = torch.cat(guesses)
        if self.space.self_conditioning:
            self._estimate_RLE = self._clean_RLE.masked_scatter(self.blank_RL[..., None], torch.cat(plain))
        return torch.cat(shaped)

    def most_likely(self, z_NE: Tensor, gamma: Tensor) -> Tensor:
        """[N]: the tokens of largest probability."""
        law = replace(self.law, temperature=0.0)
        return torch.cat([law.probabilities(logits_NV).argmax(-1) for logits_NV in self._logits(z_NE, gamma)])

    def draw(self, z_NE: Tensor, gamma: Tensor, asked_N: Tensor, uniform_Q: Tensor) -> Tensor:
        """A token for each position that asked_N chooses, from x_theta as the law's options shape it."""
        laws = [self.law.probabilities(logits_NV) for logits_NV in self._logits(z_NE, gamma, asked_N)]
        rows = rows_at_once(len(self.space.table_VE))
        return torch.cat([inverse_cdf(p_NV, u_N) for p_NV, u_N in zip(laws, uniform_Q.split(rows), strict=True)])

    def _logits(self, z_NE: Tensor, gamma: Tensor, asked_N: Tensor | None = None) -> Iterator[Tensor]:
        """Logits of the positions to fill, or those of them in asked_N, with the evidence of z_t, float64, for a bounded number at a time."""
        table_VE = self.space.table_VE
        features_ND = self._features(z_NE, gamma)[self.blank_RL]
        evidence_NE = self.space.evidence * evidence_scale(gamma) * z_NE
        if asked_N is not None:
            features_ND, evidence_NE = features_ND[asked_N], evidence_NE[asked_N]
        rows = rows_at_once(len(table_VE))
        for x_ND, evidence in zip(features_ND.split(rows), evidence_NE.split(rows), strict=True):
            yield self.network.logits(x_ND).double() + evidence @ table_VE.T

    def _features(self, z_NE: Tensor, gamma: Tensor) -> Tensor:
        """[R, L, D]: the network's view of everything at once, in fp32."""
        (rows, length), width = self.blank_RL.shape, z_NE.shape[-1]
        z_RLE = self._clean_RLE.masked_scatter(self.blank_RL[..., None], z_NE)
        inputs = NetworkInput(
            latents_BLE=(network_scale(gamma, width) * z_RLE).float(),
            estimate_BLE=(width**0.5 * self._estimate_RLE).float(),
            positions_BL=torch.arange(length, device=z_NE.device).expand(rows, length),
            conditioning_B=gamma.float().expand(rows),
            attention=Attention.FULL,
            ids_BL=self._ids_RL if self.space.prompt_table else None,
            given_BL=~self.blank_RL if self.space.prompt_table else None,
        )
        return self.network.features(inputs)
