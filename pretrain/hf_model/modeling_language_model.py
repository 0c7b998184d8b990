"""The exported model as `transformers` loads it: a network of either family with what its objective needs to score and to sample text.

    model = AutoModel.from_pretrained(folder, trust_remote_code=True)
    logits = model(input_ids).logits           # what the network says of a canvas: masks (or noise) where tokens are to be filled in
    loss = model(input_ids, labels=ids).loss   # the negative log-likelihood (ar), or a bound on it from seeded noise
    ids = model.sample(count=4, seed=1).sequences

Shape suffixes: B sequences, L positions, V model vocabulary, J digits of a token, E width of an embedding.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.utils import ModelOutput

from .attention_patterns import Pattern, lower_triangle
from .configuration_language_model import LanguageModelConfig
from .digits import DigitCode
from .esolm_math import PartialSchedule
from .gaussian_diffusion import UnitEmbedding
from .generation_cache import CACHE_NAME, GenerationCache, new_generation_cache
from .likelihood_draws import Text
from .likelihood_model import Nats, latent_input, score
from .modeling_network import build_network
from .monotone_schedule import LearnedSchedule
from .network_input import Attention, NetworkInput
from .sampling_model import Samples, fill, starting_canvas
from .sampling_replaid import LatentSpace
from .uniform_diffusion import SMALLEST_ALPHA, time_conditioning

if TYPE_CHECKING:
    # transformers 4 copies a folder's modules before it imports them: those that this file names, and not what they import in turn.
    from .configuration_network import NetworkConfig  # noqa: F401
    from .diffusion_math import LogLinearSchedule  # noqa: F401
    from .gaussian_solvers import Solver  # noqa: F401
    from .likelihood_terms import allowed  # noqa: F401
    from .modeling_dit import DiT  # noqa: F401
    from .modeling_inputs import TokenInput  # noqa: F401
    from .modeling_layers import Backbone  # noqa: F401
    from .modeling_llama import Llama  # noqa: F401
    from .sampling_ar import sample_ar  # noqa: F401
    from .sampling_draw import TokenLaw  # noqa: F401
    from .sampling_duo import sample_duo  # noqa: F401
    from .sampling_esolm import sample_esolm  # noqa: F401
    from .sampling_esolm_orders import Reveals  # noqa: F401
    from .sampling_mdlm import sample_mdlm  # noqa: F401
    from .sampling_methods import Method  # noqa: F401
    from .sampling_network import Request  # noqa: F401
    from .sampling_noise import uniforms  # noqa: F401
    from .sampling_orders import sample_mdlm_in_order  # noqa: F401
    from .sampling_prime import sample_prime  # noqa: F401
    from .sampling_psi import Psi  # noqa: F401
    from .sampling_remask import sample_mdlm_psi  # noqa: F401
    from .sampling_settings import choose_sampler  # noqa: F401

IGNORED = -100
"""The label of a token that is not scored: it is given, and diffusion leaves it clean."""


@dataclass
class LanguageModelOutput(ModelOutput):
    """loss: nats per scored token, differentiable. nelbo, nelbo_label: the likelihood term of the same draw, and what it may be called:
    exact, bound, or estimate. The key/value cache has the name that this version of `transformers` gives it."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    past_key_values: Any = None
    cache: Any = None
    nelbo: Tensor | None = None
    nelbo_label: str | None = None


class Constants(nn.Module):
    """Buffers of int64, which no change of the model's dtype rounds.

    schedule_bits  RePlaid: endpoints, slopes, shifts and heights of the learned noise schedule, the bits of their float64 values.
    digit_code     MDM-Prime-v2: the number that each id is written as.

    A module of their own, and not the model's first: transformers 4 judges the type of all weights by the first of them.
    """

    schedule_bits: Tensor
    digit_code: Tensor

    def __init__(self, config: LanguageModelConfig) -> None:
        super().__init__()
        if config.objective == "replaid":
            self.register_buffer("schedule_bits", torch.zeros(2 + 3 * config.schedule_hidden, dtype=torch.int64))
        if config.objective == "mdm_prime":
            self.register_buffer("digit_code", torch.arange(config.vocab_size))


class LanguageModel(PreTrainedModel):
    """Any of the six objectives on either backbone.

    network            the network: `network(NetworkInput)` gives logits, and samplers read it.
    embedding          RePlaid: vectors of the tokens, fp32.
    constants          what no further training changes (below).
    """

    config_class = LanguageModelConfig
    base_model_prefix = ""
    main_input_name = "input_ids"
    _auto_class = "AutoModel"  # so that save_pretrained copies the code: transformers 4 does not set it
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _no_split_modules = ["DiTBlock", "LlamaBlock"]
    _keep_in_fp32_modules_strict = ["embedding"]

    def __init__(self, config: LanguageModelConfig) -> None:
        super().__init__(config)
        self.network = build_network(config.network())
        self.embedding: UnitEmbedding | None = None
        if config.objective == "replaid":
            self.embedding = UnitEmbedding(config.vocab_size, config.latent)
            nn.init.normal_(self.embedding.weight)
        self.constants = Constants(config)
        self._parts: dict[str, Any] = {}
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Modules give themselves their first values."""

    def get_input_embeddings(self) -> nn.Module:
        """What turns a position's content into the residual stream."""
        return self.network.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        """The head."""
        return self.network.lm_head

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> nn.Module:
        """Raises ValueError for another size: mask id, noise and digit code all depend on the vocabulary."""
        if new_num_tokens is not None and new_num_tokens != self.config.vocab_size:
            raise ValueError(f"this model's vocabulary of {self.config.vocab_size} cannot be resized: its noise is defined over it")
        return self.get_input_embeddings()

    # ---- what the objective knows --------------------------------------------------------------------------------------------------

    @property
    def code(self) -> DigitCode:
        """MDM-Prime-v2's digits. Raises ValueError for a buffer that is no permutation."""
        if "code" not in self._parts:
            self._parts["code"] = DigitCode.of_codes(self.constants.digit_code, base=self.config.digit_base, digits=self.config.digits)
        return self._parts["code"]

    def schedule(self) -> LearnedSchedule:
        """RePlaid's noise schedule, float64, on the model's device, without gradients."""
        hidden = self.config.schedule_hidden
        values = self.constants.schedule_bits.view(torch.float64)
        schedule = LearnedSchedule(0.0, 0.0, hidden).to(values.device).requires_grad_(False)
        ends, slope, shift, height = values.split((2, hidden, hidden, hidden))
        pairs = ((schedule.gamma_0, ends[0]), (schedule.gamma_1, ends[1]))
        for parameter, value in (*pairs, *zip(schedule.interior.parameters(), (slope, shift, height), strict=True)):
            parameter.data.copy_(value)
        return schedule

    def latent_space(self) -> LatentSpace:
        """What RePlaid's sampler needs besides the network."""
        schedule, config = self.schedule(), self.config
        return LatentSpace(
            table_VE=self.table().detach().double(), gamma=lambda t: schedule(t)[0], evidence=float(config.output_prior),
            self_conditioning=bool(config.self_conditioning), prompt_table=bool(config.prompt_table),
        )  # fmt: skip

    def table(self) -> Tensor:
        """[V, E], fp32: RePlaid's embedding of every id, of length 1."""
        assert self.embedding is not None
        weight_VE = self.embedding.weight.float()
        return weight_VE / (torch.linalg.vector_norm(weight_VE, dim=-1, keepdim=True) + 1e-8)

    # ---- scoring -----------------------------------------------------------------------------------------------------------------

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        timesteps: Tensor | None = None,
        latents: Tensor | None = None,
        estimate: Tensor | None = None,
        digits: Tensor | None = None,
        seed: int | None = None,
        return_dict: bool | None = None,
        **_: Any,
    ) -> LanguageModelOutput | tuple[Any, ...]:
        """Logits of a canvas; with `labels`, a seeded estimate of the loss and no logits.

        input_ids       [B, L]. Without labels: the canvas, with the mask id (mdm_prime: -1) where something is to be filled in. With
                        labels: the text, which is noised here.
        labels          [B, L]: the ids that are scored, -100 where a token is given.
        attention_mask  [B, L], 0 at padding.
        timesteps       t in [0, 1] of each sequence, which duo and replaid read.
        latents, estimate   replaid: [B, L, E], z_t and the previous estimate of the clean embeddings (zeros: none). A model with a table for
                        prompts reads them from input_ids, which has the mask id everywhere else.
        digits          mdm_prime: [B, L, J] in place of input_ids, the base standing for a masked digit.
        seed            of the noise; None: a fresh one from torch's generator.

        Raises ValueError for what the objective does not read.
        """
        documents_BL = _documents(attention_mask)
        if labels is None:
            canvas = self._canvas(input_ids, documents_BL, timesteps, latents, estimate, digits)
            output = LanguageModelOutput(logits=self._logits(canvas, input_ids))
        else:
            nats = self.score(input_ids, labels, documents_BL=documents_BL, seed=seed)
            count = (labels != IGNORED).sum().clamp(min=1)
            output = LanguageModelOutput(loss=nats.loss_B.sum() / count, nelbo=nats.nelbo_B.detach().sum() / count, nelbo_label=nats.label)
        return output if return_dict in (None, True) else output.to_tuple()

    def score(self, input_ids: Tensor | None, labels: Tensor, *, documents_BL: Tensor | None = None, seed: int | None = None) -> Nats:
        """Nats of each sequence under one draw of noise, summed over the tokens whose label is not -100."""
        scored_BL = labels != IGNORED
        ids_BL = torch.where(scored_BL, labels, 0 if input_ids is None else input_ids)
        if seed is None:
            seed = int(torch.randint(2**62, ()))
        return score(self, Text(ids_BL=ids_BL, scored_BL=scored_BL, documents_BL=documents_BL, seed=seed))

    def _canvas(
        self, input_ids: Tensor | None, documents_BL: Tensor | None, t_B: Tensor | None, latents: Tensor | None, estimate: Tensor | None,
        digits: Tensor | None,
    ) -> NetworkInput:  # fmt: skip
        config = self.config
        held: dict[str, Any] = {"ids_BL": input_ids}
        conditioning_B = None
        if config.objective in ("duo", "replaid") and t_B is None:
            raise ValueError(f"{config.objective} is told the noise level: give timesteps=t, one in [0, 1] per sequence")
        if config.objective == "duo" and t_B is not None:
            conditioning_B = time_conditioning((1 - t_B.double()).clamp(min=SMALLEST_ALPHA), config.schedule_eps)
        elif config.objective == "mdm_prime":
            held = {"digits_BLJ": self._digits(input_ids) if digits is None else digits}
        elif config.objective == "replaid" and t_B is not None:
            if latents is None:
                raise ValueError("replaid reads latents=z_t, not ids; sample() and labels make them")
            gamma_B = self.schedule()(t_B.double())[0]
            prompt = None
            if config.prompt_table and input_ids is not None:
                prompt = input_ids, input_ids != config.mask_token_id
            return latent_input(latents, estimate, gamma_B, documents_BL, prompt)
        first = next(iter(held.values()))
        if first is None:
            raise ValueError(f"{config.objective} reads input_ids")
        batch, length = first.shape[:2]
        zeros_B = torch.zeros(batch, device=first.device)
        positions_BL = torch.arange(length, device=first.device).expand(batch, -1)
        causal = config.objective in ("ar", "esolm")
        canvas = NetworkInput(
            positions_BL=positions_BL, documents_BL=documents_BL, attention=Attention.CAUSAL if causal else Attention.FULL,
            conditioning_B=zeros_B if conditioning_B is None else conditioning_B.float(), **held,
        )  # fmt: skip
        return self._known_first(canvas) if config.objective == "esolm" else canvas

    def _digits(self, ids_BL: Tensor | None) -> Tensor:
        if ids_BL is None:
            raise ValueError("mdm_prime reads input_ids, -1 where a token is to be filled in, or digits")
        return torch.where((ids_BL < 0)[..., None], self.code.base, self.code.encode(ids_BL.clamp(min=0)))

    def _known_first(self, canvas: NetworkInput) -> NetworkInput:
        """Eso-LM's order of generation: what is known, then masks, each from left to right."""
        assert canvas.ids_BL is not None
        order_BL = (canvas.ids_BL == self.config.mask_token_id).int().argsort(dim=-1, stable=True)
        documents_BL = None if canvas.documents_BL is None else canvas.documents_BL.gather(1, order_BL)
        return NetworkInput(
            ids_BL=canvas.ids_BL.gather(1, order_BL), positions_BL=order_BL, documents_BL=documents_BL,
            conditioning_B=canvas.conditioning_B, attention=Attention.CAUSAL,
        )  # fmt: skip

    def _logits(self, canvas: NetworkInput, input_ids: Tensor | None) -> Tensor:
        logits_BLV = self.network(canvas)
        if self.config.objective != "esolm":
            return logits_BLV
        back_BL = canvas.positions_BL.argsort(-1)
        return logits_BLV.gather(1, back_BL[..., None].expand_as(logits_BLV))

    # ---- sampling ----------------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def sample(
        self, canvas: Tensor | None = None, *, count: int = 1, length: int | None = None, prompt: list[int] | Tensor | None = None, seed: int = 0,
        **settings: Any,
    ) -> Samples:  # fmt: skip
        """Fill in what a canvas leaves open; without one, `count` sequences of `length` tokens that begin with `prompt`.

        canvas    [B, L] ids with the mask id (mdm_prime and ar: -1) at the positions to fill.
        settings  sampler, steps, temperature, top_k, top_p and the sampler's own (sampling_settings.SAMPLERS); the rest is config.sampling's.
        """
        if canvas is None:
            canvas = starting_canvas(self, count=count, length=length or self.config.max_position_embeddings, prompt=prompt)
        return fill(self, canvas.to(self.device), seed=seed, settings=settings)

    def partial_schedule(self) -> PartialSchedule:
        """Eso-LM's noise schedule in training."""
        return PartialSchedule(self.config.alpha_0, self.config.schedule_eps)


class AutoregressiveLanguageModel(LanguageModel, GenerationMixin):
    """The same with `generate`: beams, left padding and the caches of `transformers`."""

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        cache: Any = None,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
        **_: Any,
    ) -> LanguageModelOutput | tuple[Any, ...]:
        """Logits of the next tokens; with labels also the mean -log p(label of the next position), which is exact.

        position_ids default to places among what the attention mask keeps.
        """
        if input_ids is None:
            raise ValueError("ar reads input_ids")
        store = cache if cache is not None else past_key_values
        if store is None and use_cache and labels is None:
            store = new_generation_cache()
        adapter = None if store is None else GenerationCache(store)
        cached = 0 if adapter is None else adapter.length
        pattern, positions_BL = _left_padded(input_ids, attention_mask, cached)
        inputs = NetworkInput(
            ids_BL=input_ids, positions_BL=positions_BL if position_ids is None else position_ids, attention=Attention.CAUSAL,
            conditioning_B=torch.zeros(len(input_ids), device=input_ids.device),
        )  # fmt: skip
        logits_BLV = self.network.logits(self.network.features(inputs, adapter, pattern))
        output = LanguageModelOutput(logits=logits_BLV, **{CACHE_NAME: store})
        if labels is not None:
            wanted = labels[:, 1:].flatten()
            flat = logits_BLV[:, :-1].flatten(0, 1).float()
            total = nn.functional.cross_entropy(flat, wanted, ignore_index=IGNORED, reduction="sum")
            output.loss = total / (wanted != IGNORED).sum().clamp(min=1)
            output.nelbo, output.nelbo_label = output.loss.detach(), "exact"
        return output if return_dict in (None, True) else output.to_tuple()

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, past_key_values: Any = None, cache: Any = None, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """What `forward` reads in the next step: the tokens that the cache does not hold yet."""
        store = cache if cache is not None else past_key_values
        known = 0 if store is None else GenerationCache(store).length
        given: dict[str, Any] = {"input_ids": input_ids[:, known:], "attention_mask": attention_mask, "use_cache": kwargs.get("use_cache", True)}
        return given | {CACHE_NAME: store}


def _documents(attention_mask: Tensor | None) -> Tensor | None:
    """Document numbers that keep padding apart; None where there is none."""
    if attention_mask is None or bool((attention_mask != 0).all()):
        return None
    return torch.where(attention_mask != 0, 0, -1).int()


def _left_padded(ids_BL: Tensor, attention_mask: Tensor | None, cached: int) -> tuple[Pattern | None, Tensor]:
    """The pattern that hides padding (None where there is none), and each token's place among what is not padding."""
    batch, length = ids_BL.shape
    if attention_mask is None or attention_mask.dim() != 2 or bool((attention_mask != 0).all()):
        return None, torch.arange(cached, cached + length, device=ids_BL.device).expand(batch, -1)
    seen_BS = attention_mask != 0
    place_BL = (seen_BS.long().cumsum(-1) - 1).clamp(min=0)[:, -length:]
    allowed = lower_triangle(length, cached, ids_BL.device) & seen_BS[:, None, None, :]
    # A padded query sees itself: a row of the softmax must not be empty.
    own = torch.eye(length, cached + length, dtype=torch.bool, device=ids_BL.device).roll(cached, -1)
    return Pattern(allowed | own, is_causal=False), place_BL
