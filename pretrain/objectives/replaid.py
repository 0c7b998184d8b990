"""RePlaid, Gaussian diffusion over learned token embeddings (Yang et al. 2026, "Continuous Diffusion Scales Competitively with Discrete
Diffusion for Language", which follows Plaid, Gulrajani and Hashimoto 2023).

Each token has an embedding e of length 1 and width E = 16. Noise: z_t = alpha_t e + sigma_t n, with alpha^2 = sigmoid(-gamma),
sigma^2 = sigmoid(gamma) and a learned gamma(t) = gamma_0 + (gamma_1 - gamma_0) g(t) (equation 1 and "Learnable noise schedule").
The network gives logits; the evidence of z_t itself, (alpha / sigma^2) z E^T, is added to them; x_theta = softmax, e_theta = x_theta E.
The bound (equation 4), per sequence:

    -log p(x) <= KL(q(z_1|x) || N(0, I)) + E[sum_l -log x_theta^l(z_0)[x^l]] + E_t[½ e^-gamma gamma'(t) |e_theta(z_t) - e|^2]
                 prior                     reconstruction                      diffusion

Reconstruction and diffusion are drawn on different sequences. In training the first n of the B places of the global batch are
reconstruction entries (weight B/n) and the rest diffusion entries (weight B/(B-n)) at t = (i + u)/(B-n), with one u for the batch; n
divides the batch by the two terms' standard deviations, half and half before there are any. With B = 1 a fair coin decides, weight 2. In
evaluation every sequence is drawn once in either part. So the mean over a batch, or over a sequence's draws, is the bound without bias.

Who learns what (as in Plaid): the network of g minimises the *variance* of the diffusion term, that is E[loss^2] of each
example's loss per token, everything else the bound. So g(t) and g'(t) are leaves; `finish` multiplies their gradients by twice the
loss and carries them on. Examples with self-conditioning (a first pass whose e_theta is fed back) train the network alone: for them gamma,
gamma', the endpoints and all uses of the embeddings are constants.

gamma, its schedule and the scalar weights are float64, the latents and the loss fp32 (float64 logits keep float64 throughout).
Weight decay: AdamW takes lr * endpoint_decay off the endpoints in each step, as the configuration says (Plaid takes
endpoint_decay itself: set endpoint_decay / learning_rate for that), and nothing off the rest.

Shape suffixes: B sequences, L positions, E width of an embedding, v this rank's share of the vocabulary.
"""

from collections.abc import Mapping
from typing import final

import numpy as np
import torch
from torch import Tensor, nn

from pretrain.hf_model.gaussian_diffusion import UnitEmbedding, diffuse, evidence_scale, network_scale, per_sequence, prior_divergence, snr
from pretrain.hf_model.monotone_schedule import LearnedSchedule
from pretrain.hf_model.network_input import Attention, NetworkInput
from pretrain.objectives.base import Corrupted, Label, Objective, Tensors, TokenLoss, open_text
from pretrain.objectives.config import ObjectiveConfig
from pretrain.objectives.replaid_state import RunningState, initialize
from pretrain.parallel.noise import Noise
from pretrain.parallel.vocab import VocabShard
from pretrain.parallel.vocabulary import Vocabulary


@final
class RePlaid(Objective):
    """Gaussian diffusion over embeddings.

    Drawn per sample: `normals` [L, E], `u` (of the batch in training, the sample's own in evaluation), `place` in the global `batch`,
    `part` and `share` (evaluation), `offset` (which places condition themselves in this step). `prepare` makes of them: the leaves
    `g` and `dg`, `t`, `reconstruct`, `weight`, `self_conditioned`.
    """

    name = "replaid"
    attention = Attention.FULL
    evaluation_parts = 2

    def __init__(self, vocabulary: Vocabulary, config: ObjectiveConfig) -> None:
        super().__init__(vocabulary)
        self.config = config.replaid
        self.embedding = UnitEmbedding(vocabulary.padded_size, self.config.latent)
        self.schedule = LearnedSchedule(self.config.gamma_0, self.config.gamma_1, self.config.schedule_hidden)
        self.running = RunningState()
        initialize(self.embedding, self.schedule, self.config)
        self._own = nn.ModuleDict({"embedding": self.embedding, "schedule": self.schedule, "running": self.running})
        self._every = round(1 / self.config.self_conditioning) if self.config.self_conditioning else 0

    def label(self, *, evaluation: bool) -> Label:
        """A bound: all three terms over the whole range of t. In training it is that of the two denoisers, with and without an estimate, mixed."""
        return "bound"

    def corrupt(
        self, tokens: np.ndarray, documents: np.ndarray, noise: Noise, *, evaluation: bool, prompt: np.ndarray | None = None
    ) -> Corrupted:
        """Draw normals and times; the noisy latents follow where embeddings and schedule are known. Padding and prompt get no noise."""
        text_L = open_text(documents, prompt)
        normals_LE = noise.stream("normals").standard_normal((len(tokens), self.config.latent), dtype=np.float32)
        normals_LE[~text_L] = 0.0
        drawn = {
            "ids": tokens,
            "normals": normals_LE,
            "u": np.array(noise.stratified_time("t") if evaluation else noise.shared_stream("t").random()),
            "place": np.array(noise.position),
            "batch": np.array(noise.batch),
            "part": np.array(noise.part),
            "share": np.array(noise.share),
            "offset": np.array(noise.shared_stream("self_conditioning").integers(self._every) if self._every else 0),
        }
        count, given = int(text_L.sum()), {} if prompt is None else {"prompt": prompt & (documents >= 0)}
        return Corrupted(
            inputs=drawn | given | {"positions": np.arange(len(tokens)), "documents": documents},
            targets=drawn | {"text": text_L, "count": np.array(count)},
            count=count,
        )

    # ---- what depends on parameters and running state ------------------------------------------------------------------------------

    def modules(self) -> nn.ModuleDict:
        """Embeddings, schedule, and the running state as buffers."""
        return self._own

    @torch.no_grad()
    def prepare(self, inputs: Tensors, targets: Tensors, *, evaluation: bool) -> tuple[Tensors, Tensors]:
        """Times, weights, and the schedule at them; in training g and g' are leaves."""
        t_B, reconstruct_B, weight_B = self._evaluation_times(inputs) if evaluation else self._training_times(inputs)
        g_B, dg_B = self.schedule.interior(t_B)
        prepared = {
            "g": g_B.requires_grad_(not evaluation),
            "dg": dg_B.requires_grad_(not evaluation),
            "self_conditioned": self._self_conditioned(inputs, evaluation=evaluation),
        }
        return inputs | prepared, targets | prepared | {"t": t_B, "reconstruct": reconstruct_B, "weight": weight_B}

    def _training_times(self, drawn: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """t, whether the entry is a reconstruction entry, and its weight."""
        u_B, place_B, batch_B = drawn["u"], drawn["place"], drawn["batch"]
        entries_B = (batch_B * self.running.reconstruction_share()).round().clamp(min=1.0).minimum(batch_B - 1.0)
        alone_B = batch_B == 1
        reconstruct_B = torch.where(alone_B, u_B < 0.5, place_B < entries_B)
        t_B = torch.where(alone_B, 2 * u_B - 1, (place_B - entries_B + u_B) / (batch_B - entries_B))
        weight_B = torch.where(alone_B, 2.0, batch_B / torch.where(reconstruct_B, entries_B, batch_B - entries_B))
        return torch.where(reconstruct_B, 0.0, t_B), reconstruct_B, weight_B

    def _evaluation_times(self, drawn: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        reconstruct_B = drawn["part"] == 0
        return torch.where(reconstruct_B, 0.0, 1 - drawn["u"]), reconstruct_B, 1 / drawn["share"]

    def _self_conditioned(self, drawn: Mapping[str, Tensor], *, evaluation: bool) -> Tensor:
        """Every n-th place from a random one on; all sequences in evaluation."""
        place_B = drawn["place"]
        if not self._every or evaluation:
            return torch.full_like(place_B, bool(self._every), dtype=torch.bool)
        return place_B % self._every == drawn["offset"]

    # ---- self-conditioning ----------------------------------------------------------------------------------------------------------

    def preliminary_rows(self, inputs: Tensors, *, evaluation: bool) -> Tensor | None:
        """The self-conditioned sequences: a quarter in training by default, all in evaluation."""
        return self._self_conditioned(inputs, evaluation=evaluation) if self._every else None

    def preliminary_width(self) -> int:
        """E."""
        return self.config.latent

    @torch.no_grad()
    def preliminary_result(self, logits_BLv: Tensor, targets: Tensors, vocab: VocabShard) -> Tensor:
        """e_theta of the pass without an estimate, at these positions."""
        return self._denoise(logits_BLv, targets, vocab)[1]

    # ---- network and loss -----------------------------------------------------------------------------------------------------------

    def network_input(self, inputs: Tensors, vocab: VocabShard) -> NetworkInput:
        """z_t scaled to mean square 1, the estimate (zero where there is none) to length sqrt(E), and gamma as conditioning."""
        gamma_B, _, _ = self._gamma(inputs)
        clean_BLE, z_BLE = self._latents(inputs, gamma_B, self.embedding(vocab.start, vocab.end), vocab)
        estimate_BLE = inputs.get("estimate")
        if "prompt" in inputs:  # as samplers have it: without noise and without its scale, and the estimate of it is itself
            prompt_BL1 = inputs["prompt"].unsqueeze(-1)
            z_BLE = torch.where(prompt_BL1, clean_BLE, z_BLE)
            if estimate_BLE is not None:
                known_BL1 = prompt_BL1 & inputs["self_conditioned"].view(-1, 1, 1)
                estimate_BLE = torch.where(known_BL1, clean_BLE.detach().to(estimate_BLE), estimate_BLE)
        return self.reading(z_BLE, gamma_B, estimate_BLE, inputs)

    def reading(self, z_BLE: Tensor, gamma_B: Tensor, estimate_BLE: Tensor | None, inputs: Tensors) -> NetworkInput:
        """What the network reads of latents at this noise level; positions, documents and prompt from `inputs`."""
        estimate_BLE = torch.zeros_like(z_BLE) if estimate_BLE is None else estimate_BLE
        table = self.config.prompt_embedding
        return NetworkInput(
            ids_BL=inputs["ids"] if table else None,
            given_BL=inputs.get("prompt", torch.zeros_like(inputs["ids"], dtype=torch.bool)) if table else None,
            latents_BLE=per_sequence(network_scale(gamma_B, self.config.latent), z_BLE) * z_BLE,
            estimate_BLE=estimate_BLE * self.config.latent**0.5,
            positions_BL=inputs["positions"],
            conditioning_B=gamma_B.to(z_BLE.dtype),
            documents_BL=inputs.get("documents"),
            attention=self.attention,
        )

    def token_loss(self, logits_BLv: Tensor, targets: Tensors, vocab: VocabShard) -> TokenLoss:
        """The bound is what training minimises."""
        loss_B = self.token_nelbo(logits_BLv, targets, vocab).sum(-1)
        return TokenLoss(loss_B=loss_B, nelbo_B=loss_B.detach())

    def token_nelbo(self, logits_BLv: Tensor, targets: Tensors, vocab: VocabShard) -> Tensor:
        """Equation 4, its position's share: the prior, and this entry's term times its weight; 0 on padding."""
        nats_BL, mean_BLE, clean_BLE = self._denoise(logits_BLv, targets, vocab)
        gamma_B, slope_B, gamma_1_B = self._gamma(targets)
        prior_B = prior_divergence(gamma_1_B, self.config.latent).to(nats_BL)
        density_B = (0.5 * snr(gamma_B) * slope_B).to(nats_BL)
        diffusion_BL = density_B.unsqueeze(-1) * (mean_BLE - clean_BLE).square().sum(-1)
        term_BL = torch.where(targets["reconstruct"].unsqueeze(-1), nats_BL, diffusion_BL) * targets["weight"].to(nats_BL).unsqueeze(-1)
        # `where`, not a product: a padding id may be one that the model cannot predict, whose cross-entropy is infinite.
        return torch.where(targets["text"], term_BL + prior_B.unsqueeze(-1), 0.0)

    def _denoise(self, logits_BLv: Tensor, targets: Tensors, vocab: VocabShard) -> tuple[Tensor, Tensor, Tensor]:
        """-log x_theta[x], e_theta and e."""
        gamma_B, _, _ = self._gamma(targets)
        table_vE = self.embedding(vocab.start, vocab.end)
        clean_BLE, z_BLE = self._latents(targets, gamma_B, table_vE, vocab)
        evidence_BLE = self.evidence(z_BLE, gamma_B)
        nats_BL, mean_BLE = vocab.cross_entropy_and_mean(logits_BLv, evidence_BLE, table_vE, targets["ids"], ~targets["self_conditioned"])
        return nats_BL, mean_BLE, clean_BLE

    def evidence(self, z_BLE: Tensor, gamma_B: Tensor) -> Tensor | None:
        """What times E^T is added to the logits: z_t's own word about each token, as far as the ramp lets it; None without the output prior."""
        if not self.config.output_prior:
            return None
        scale_B = evidence_scale(gamma_B) * self.running.ramp(self.config.prior_ramp_steps)
        return per_sequence(scale_B, z_BLE) * z_BLE

    def _latents(self, drawn: Tensors, gamma_B: Tensor, table_vE: Tensor, vocab: VocabShard) -> tuple[Tensor, Tensor]:
        """e and z_t: the same bits on the first stage and on the last."""
        clean_BLE = _constant_where(drawn["self_conditioned"], vocab.lookup(table_vE, drawn["ids"]))
        return clean_BLE, diffuse(clean_BLE, drawn["normals"], gamma_B)

    def _gamma(self, prepared: Tensors) -> tuple[Tensor, Tensor, Tensor]:
        """gamma(t), gamma'(t) and gamma_1, float64 [B]."""
        g_B, dg_B = prepared["g"], prepared["dg"]
        values = (self.schedule.gamma(g_B), self.schedule.gamma_slope(dg_B), self.schedule.gamma_1.expand_as(g_B))
        gamma_B, slope_B, gamma_1_B = (_constant_where(prepared["self_conditioned"], value_B) for value_B in values)
        return gamma_B, slope_B, gamma_1_B

    # ---- the schedule's gradient and the running state -------------------------------------------------------------------------------

    def finish(self, targets: Tensors, loss_B: Tensor) -> None:
        """The network of g gets the gradient of the squared diffusion loss per token: 2 * loss times what reached its values."""
        g_B, dg_B = targets["g"], targets["dg"]
        factor_B = torch.where(targets["reconstruct"], 0.0, 2 * self._per_token(targets, loss_B))
        with torch.enable_grad():
            values = self.schedule.interior(targets["t"])
        torch.autograd.backward(values, [torch.zeros_like(x) if x.grad is None else factor_B * x.grad for x in (g_B, dg_B)])

    @torch.no_grad()
    def statistics(self, targets: Tensors, loss_B: Tensor) -> Tensor:
        """[2, 3]: for reconstruction and diffusion entries, how many there are and the sums of their loss per token and of its square."""
        value_B = self._per_token(targets, loss_B)
        counted_B = targets["count"] > 0
        kind_2B = torch.stack((targets["reconstruct"] & counted_B, ~targets["reconstruct"] & counted_B)).to(value_B)
        return kind_2B @ torch.stack((torch.ones_like(value_B), value_B, value_B.square()), -1)

    def advance(self, statistics: Tensor | None) -> None:
        """Moments of the two terms, and the step of the output prior's ramp."""
        self.running.advance(statistics)

    @torch.no_grad()
    def _per_token(self, targets: Tensors, loss_B: Tensor) -> Tensor:
        """float64: the entry's own term per token, without its weight and the prior."""
        prior = prior_divergence(self.schedule.gamma_1, self.config.latent)
        text_B = targets["count"].clamp(min=1)
        return torch.where(targets["count"] > 0, (loss_B.double() / text_B - prior) / targets["weight"], 0.0)


def _constant_where(constant_B: Tensor, values: Tensor) -> Tensor:
    """The same values; sequences where `constant_B` holds pass no gradient."""
    return torch.where(constant_B.view(-1, *(1 for _ in values.shape[1:])), values.detach(), values)
