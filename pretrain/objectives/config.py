"""Which objective, with its constants. No torch here: configuration must load in milliseconds."""

from dataclasses import dataclass, field
from typing import Literal

ObjectiveName = Literal["ar", "mdlm", "duo", "esolm", "replaid", "mdm_prime"]


@dataclass(frozen=True, kw_only=True)
class DuoConfig:
    """Duo's Gaussian curriculum, in the top-k form of "The Diffusion Duality, Chapter II"; the 1.7B run trains without it.

    curriculum       none: the plain NELBO throughout (duo_base). topk: softened inputs until `curriculum_end`, the plain NELBO after it.
    top_k            entries of the softened input that are kept, at least 2.
    log10_tau_start, log10_tau_end   temperature of the softmax, interpolated on the log scale from `curriculum_start` to `curriculum_end`
                     (steps); constant before and after.
    gamma_min, gamma_max   range of the Gaussian log noise-to-signal ratio; None: where the discrete alpha is 0.95 and 0.05 for the run's K.
    """

    curriculum: Literal["none", "topk"] = "none"
    top_k: int = 16
    log10_tau_start: float = -3.0
    log10_tau_end: float = -3.0
    curriculum_start: int = 0
    curriculum_end: int = 500_000
    gamma_min: float | None = None
    gamma_max: float | None = None


@dataclass(frozen=True, kw_only=True)
class EsoLMConfig:
    """Eso-LM.

    alpha_0          expected share of tokens that diffusion generates: 1 is pure diffusion, 0 pure autoregression (in any order).
    batch_split      share of the batch that trains the diffusion term where 0 < alpha_0 < 1; the rest trains the sequential term.
    evaluate         nelbo: the two-part bound. any_order: the likelihood of random orders through the two-stream path, with one order
                     (L_AO) or the importance-weighted bound over `orders` of them.
    orders           orders per sequence of the any_order evaluation.
    clean_order      how the clean tokens of a noised sequence are reordered: shuffled, as the paper trains; natural: from left to right, which is
                     what decoding from left to right will show (any order independent of the text leaves the bound one).
    """

    alpha_0: float = 1.0
    batch_split: float = 0.5
    evaluate: Literal["nelbo", "any_order"] = "nelbo"
    orders: int = 1
    clean_order: Literal["shuffled", "natural"] = "shuffled"


@dataclass(frozen=True, kw_only=True)
class RePlaidConfig:
    """RePlaid.

    latent             width of the learned token embeddings.
    gamma_0, gamma_1   initial endpoints of the log noise-to-signal ratio; both are learned.
    schedule_hidden    width of the monotone network between the endpoints.
    self_conditioning  share of training examples that get an estimate from a preliminary pass: 0, or 1/n with n >= 2 (embeddings and schedule
                       learn from the others); evaluation then uses it on all.
    output_prior       add the evidence of z_t about each token, (alpha / sigma^2) z E^T, to the logits.
    prior_ramp_steps   steps over which that addition grows from 0 to its full size.
    learning_rate      peak for embeddings, schedule and endpoints in place of the run's; warm-up and decay are the run's.
    endpoint_decay     decoupled weight decay of the endpoints: lr * decay is taken off per step (Plaid takes off 1e-3 whatever the rate; that
                       is 0.1 at a rate of 1e-2).
    prompt_embedding   prompts are read from a table of their own, [vocabulary, width of the network], in place of their clean embeddings
                       (appendix "Separate prompt embedding table"); it is the network's own, with the run's learning rate.
    """

    latent: int = 16
    gamma_0: float = -3.0
    gamma_1: float = 6.0
    schedule_hidden: int = 1024
    self_conditioning: float = 0.25
    output_prior: bool = True
    prior_ramp_steps: int = 5000
    learning_rate: float = 1e-2
    endpoint_decay: float = 1e-3
    prompt_embedding: bool = False


@dataclass(frozen=True, kw_only=True)
class MDMPrimeConfig:
    """MDM-Prime-v2: masked diffusion over the digits of token ids.

    base, digits       each token id is written with `digits` digits of this base, most significant first: as many as the vocabulary needs
                       (in base 2: 15 for 32000 ids, 16 for 50257, 17 for 131072), and no more.
    shuffle_seed       seed of the permutation of ids before they are written as digits; None: no shuffling.
    join               how a token's digit embeddings make one: concat_shared (one table), concat (a table per digit), sum (a table per digit).
    carry_over         a token that contradicts a visible digit gets probability 0.
    loss               what training minimises: marginal (the NELBO's sum over masked digits) or joint (the paper's cross-entropy of the whole
                       token, which bounds nothing).
    joint_mask_above   above this t a token's digits are masked together (the paper's A.4.2 uses 0.5); the numbers are then no likelihood.
                       None: independently at every t.
    """

    base: int = 2
    digits: int = 15
    shuffle_seed: int | None = 0
    join: Literal["concat_shared", "concat", "sum"] = "concat_shared"
    carry_over: bool = True
    loss: Literal["marginal", "joint"] = "marginal"
    joint_mask_above: float | None = None


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """Constants of an objective.

    name             ar, mdlm, duo, esolm, replaid or mdm_prime.
    mask_id          id that the tokenizer keeps free for the mask; None: the id after the tokenizer's last. Not for ar and mdm_prime.
    schedule_eps     e of the log-linear schedule alpha_t = 1 - (1 - e) t while training (authors: 1e-3). Not for ar and replaid.
    time_eps         training draws t from [time_eps, 1] (authors: 1e-3). Not for ar and replaid.
    low_variance     train on the masked cross-entropy with weight 1 instead of the NELBO's weight (Sahoo et al. 2026, section 3.2.2): mdlm, and
                     esolm at alpha_0 = 1; None: where it applies.
    evaluation       bound: evaluate with e = 0 and t in (0, 1], whose value is a bound; authors: with the training constants, an estimate
                     (for mdm_prime the token-joint cross-entropy, which is not a likelihood). Not for ar and replaid.
    """

    name: ObjectiveName
    mask_id: int | None = None
    schedule_eps: float = 1e-3
    time_eps: float = 1e-3
    low_variance: bool | None = None
    evaluation: Literal["bound", "authors"] = "bound"
    duo: DuoConfig = field(default_factory=DuoConfig)
    esolm: EsoLMConfig = field(default_factory=EsoLMConfig)
    replaid: RePlaidConfig = field(default_factory=RePlaidConfig)
    mdm_prime: MDMPrimeConfig = field(default_factory=MDMPrimeConfig)

    @property
    def has_mask(self) -> bool:
        """Whether the model's vocabulary contains a mask id: all but ar, and mdm_prime, whose mask is a digit."""
        return self.name not in ("ar", "mdm_prime")

    @property
    def parts(self) -> tuple[float, ...]:
        """Shares of the global batch that are noised in different ways."""
        split = self.esolm.batch_split
        return (split, 1 - split) if self.name == "esolm" and 0 < self.esolm.alpha_0 < 1 else (1.0,)

    @property
    def two_stream_share(self) -> float:
        """Share of training sequences that run as two streams of their length."""
        if self.name != "esolm" or self.esolm.alpha_0 == 1:
            return 0.0
        return self.parts[-1]

    @property
    def noisy_share(self) -> float:
        """Length of the noisy stream of two, as a share of the clean one's: what diffusion leaves, on average."""
        return 1 - self.esolm.alpha_0

    @property
    def preliminary_share(self) -> float:
        """Share of training sequences that take a forward pass without gradient before their own."""
        return self.replaid.self_conditioning if self.name == "replaid" else 0.0

    @property
    def has_low_variance(self) -> bool:
        """Whether the low-variance form exists for this objective."""
        return self.name == "mdlm" or (self.name == "esolm" and self.esolm.alpha_0 == 1)

    @property
    def trains_low_variance(self) -> bool:
        """Whether training minimises the low-variance form."""
        return self.has_low_variance if self.low_variance is None else self.low_variance
