"""Duo, uniform-state diffusion ("The Diffusion Duality", Sahoo et al. 2025; section 2.2.2 of "Scaling Beyond Masked Diffusion Language
Models", Sahoo et al. 2026).

Forward process: at time t each token is kept with probability alpha_t, or else drawn again, uniformly over all K ids of the model, the mask
and the token itself included: q(z_t | x) = alpha_t [z_t = x] + (1 - alpha_t) / K. The denoiser p never predicts the mask (the authors'
logit -1e6), though K counts it. Every position of text is scored. The Rao-Blackwellised continuous-time NELBO, per token, with i = z_t and m = x,
is rearranged here. With c = K alpha / (1 - alpha), the odds against noise of a p that is certain, every log xbar_j of the paper is
log(1 - alpha) + log(1 + c p_j), and

    i != m:  -alpha' { [log(1 + c p_i) - c p_i / (1 + c p_i)] / (alpha (1 - alpha))  +  log(1 + x) / (1 - alpha)  -  E / (K alpha) }
    i == m:  -alpha' / (1 + c) { [x - log(1 + x)] / alpha  +  x / (1 - alpha)  -  E / (K alpha) }

    x = c (1 - p_m) / (1 + c p_m),    E = sum_j log(1 + c p_j) - log(1 + c).

All terms but the last are >= 0, and nothing of the size of K cancels against K (the paper's form loses everything as t -> 1). The vocabulary
enters through log p_i, log p_m and sum_j log(1 + c p_j) alone; the rest is arithmetic on [B, L], in float64 because it costs nothing there.
The paper prints the sum over j to L and the sign of alpha' the other way: both typos, as d/dt KL(q || p) and the authors' code show.

What may be called a bound: with e = 0 and t uniform on (0, 1] the process starts at the text (alpha_0 = 1: no reconstruction term) and ends
exactly at the uniform distribution (alpha_1 = 0: the prior term KL(q(z_1 | x) || uniform) is 0), so the expectation is the NELBO. With the
authors' e = 1e-3 and t in [1e-3, 1] both ends are missing: an estimate. At t = 1 itself the integrand is 0 in the limit;
SMALLEST_ALPHA stands for alpha = 0 there.

The network is told the time, as sigma = -log alpha_t. Evaluation with e = 0 would show it sigmas beyond those of training, up to infinity:
they are held at training's largest, -log e (`time_conditioning`). The bound holds for whatever function of t the denoiser reads.

There is no low-variance form. The curriculum, when there is one, is described in gaussian_curriculum.py.

Shape suffixes: B sequences, L positions, v this rank's share of the vocabulary, k ids of a softened input.
"""

from typing import TYPE_CHECKING, final

import numpy as np
import torch
from torch import Tensor

from pretrain.hf_model.diffusion_math import LogLinearSchedule, bound_time, training_time
from pretrain.hf_model.network_input import Attention, NetworkInput
from pretrain.hf_model.uniform_diffusion import SMALLEST_ALPHA, NoiseLevel, time_conditioning
from pretrain.objectives.base import Corrupted, Label, Objective, TokenLoss, open_text
from pretrain.objectives.config import ObjectiveConfig
from pretrain.parallel.noise import Noise
from pretrain.parallel.vocab import VocabShard
from pretrain.parallel.vocabulary import Vocabulary

if TYPE_CHECKING:
    from pretrain.objectives.gaussian_curriculum import GaussianCurriculum, SoftDraw


@final
class Duo(Objective):
    """Uniform-state diffusion. targets: `ids` [L] the text, `noisy` [L] z_t, `scored` [L] whether it is text, and the sample's `alpha`,
    `one_minus_alpha` and `alpha_derivative`. inputs: `ids` [L]; under the curriculum `ids` [L, k] with `weights` [L, k]."""

    name = "duo"
    attention = Attention.FULL

    def __init__(self, vocabulary: Vocabulary, config: ObjectiveConfig) -> None:
        super().__init__(vocabulary)
        self.config = config
        self.classes = vocabulary.model_size
        self.curriculum: GaussianCurriculum | None = None
        if config.duo.curriculum == "topk":
            from pretrain.objectives import gaussian_curriculum  # with scipy, 20 MiB of every rank: only where it is used

            self.curriculum = gaussian_curriculum.GaussianCurriculum(self.classes, config.duo)

    def label(self, *, evaluation: bool) -> Label:
        """A bound only for evaluation draws over the whole of (0, 1] with e = 0. A run with a curriculum trains on no likelihood: softened
        inputs tell more than z_t."""
        if not evaluation and self.curriculum is not None:
            return "not_a_likelihood"
        return "bound" if self._whole_range(evaluation) else "estimate"

    def corrupt(
        self, tokens: np.ndarray, documents: np.ndarray, noise: Noise, *, evaluation: bool, prompt: np.ndarray | None = None
    ) -> Corrupted:
        """Draw t, stratified over the global batch, and z_t. Padding and prompt are never noised, scored or counted."""
        u = noise.stratified_time("t")
        t = bound_time(u) if self._whole_range(evaluation) else training_time(u, self.config.time_eps)
        if self.curriculum is not None and not evaluation and self.curriculum.active(noise.step):
            soft = self.curriculum.draw(tokens, t, noise.step, noise.stream("gaussian"))
            return self.noised(tokens, documents, t=t, level=self.curriculum.level(t), noisy_L=soft.noisy_L, soft=soft, prompt=prompt)
        level = self.level(t, evaluation=evaluation)
        generator = noise.stream("uniform")
        redrawn_L = generator.random(len(tokens)) < level.one_minus_alpha
        noisy_L = np.where(redrawn_L, generator.integers(self.classes, size=len(tokens)), tokens)
        return self.noised(tokens, documents, t=t, level=level, noisy_L=noisy_L, prompt=prompt)

    def level(self, t: float, *, evaluation: bool) -> NoiseLevel:
        """The log-linear schedule at t, with e = 0 where a bound is evaluated."""
        schedule = LogLinearSchedule(0.0 if self._whole_range(evaluation) else self.config.schedule_eps)
        return NoiseLevel(max(schedule.alpha(t), SMALLEST_ALPHA), schedule.one_minus_alpha(t), schedule.alpha_derivative)

    def noised(
        self, tokens: np.ndarray, documents: np.ndarray, *, t: float, level: NoiseLevel, noisy_L: np.ndarray, soft: "SoftDraw | None" = None,
        prompt: np.ndarray | None = None,
    ) -> Corrupted:  # fmt: skip
        """The sample with z_t = `noisy_L` at this noise level, except on padding and prompt; the network reads `soft` in its place, if given."""
        text_L = open_text(documents, prompt)
        noisy_L = np.where(text_L, noisy_L, tokens)
        inputs = {"ids": noisy_L}
        if soft is not None:
            first_k = (np.arange(soft.ids_Lk.shape[1]) == 0).astype(np.float32)
            inputs["ids"] = np.where(text_L[:, None], soft.ids_Lk, tokens[:, None])
            inputs["weights"] = np.where(text_L[:, None], soft.weights_Lk, first_k)
        return Corrupted(
            inputs=inputs
            | {
                "positions": np.arange(len(tokens)),
                "documents": documents,
                "conditioning": np.array(time_conditioning(level.alpha, self.config.schedule_eps), dtype=np.float32),
            },
            targets={
                "ids": tokens,
                "noisy": noisy_L,
                "scored": text_L,
                "alpha": np.array(level.alpha),
                "one_minus_alpha": np.array(level.one_minus_alpha),
                "alpha_derivative": np.array(level.alpha_derivative),
            },
            count=int(text_L.sum()),
            t=t,
        )

    def network_input(self, inputs: dict[str, Tensor], vocab: VocabShard) -> NetworkInput:
        """Noisy ids, or softened ones with their weights, under full attention."""
        return NetworkInput(
            ids_BL=inputs["ids"],
            weights_BLK=inputs.get("weights"),
            positions_BL=inputs["positions"],
            conditioning_B=inputs["conditioning"],
            documents_BL=inputs.get("documents"),
            attention=self.attention,
        )

    def token_loss(self, logits_BLv: Tensor, targets: dict[str, Tensor], vocab: VocabShard) -> TokenLoss:
        """The NELBO is what training minimises."""
        nats_B = self.token_nelbo(logits_BLv, targets, vocab).sum(-1)
        return TokenLoss(loss_B=nats_B, nelbo_B=nats_B.detach())

    def token_nelbo(self, logits_BLv: Tensor, targets: dict[str, Tensor], vocab: VocabShard) -> Tensor:
        """The NELBO's integrand at text, 0 at padding."""
        alpha, noise, slope = (targets[key].double().unsqueeze(-1) for key in ("alpha", "one_minus_alpha", "alpha_derivative"))
        c = self.classes * alpha / noise
        terms = vocab.log1p_terms(logits_BLv, c.squeeze(-1).log(), targets["noisy"], targets["ids"])
        logp_i, logp_m = (term_BL.double().clamp(max=0) for term_BL in terms[:2])  # an id that no rank holds could have any value
        p_i, excess = c * logp_i.exp(), terms[2].double() - torch.log1p(c)
        x = -c * torch.expm1(logp_m) / (1 + c * logp_m.exp())
        moved_BL = (torch.log1p(p_i) - p_i / (1 + p_i)) / (alpha * noise) + torch.log1p(x) / noise - excess / (self.classes * alpha)
        stayed_BL = ((x - torch.log1p(x)) / alpha + x / noise - excess / (self.classes * alpha)) / (1 + c)
        nats_BL = -slope * torch.where(targets["noisy"] == targets["ids"], stayed_BL, moved_BL)
        # `where`, not a product. Everything above is finite for any id and any finite logits, so unscored positions get gradient 0, never NaN.
        return torch.where(targets["scored"], nats_BL, 0.0).to(terms[0].dtype)

    def _whole_range(self, evaluation: bool) -> bool:
        return evaluation and self.config.evaluation == "bound"
