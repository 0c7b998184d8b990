"""The configuration of an exported model as Hugging Face's `transformers` keeps it: config.json.

Names that `transformers` has for a shape are used (hidden_size, num_hidden_layers, …); the rest is the objective's, in the words of its paper.
"""

from typing import Any

from transformers import PretrainedConfig

from .configuration_network import NetworkConfig

OBJECTIVES = ("ar", "mdlm", "duo", "esolm", "replaid", "mdm_prime")
ROPE_LAYOUT = "half_split"
"""Coordinates r and r + head width / 2 are turned together. It is written down because weights trained with pairs 2r, 2r + 1 look the same."""


class LanguageModelConfig(PretrainedConfig):
    """What the weights need to be understood, and how they are sampled.

    objective            ar, mdlm, duo, esolm, replaid or mdm_prime.
    backbone             dit or llama.
    vocab_size           classes of the model: the tokenizer's ids, and the mask id where there is one. No padding.
    tokenizer_size       ids that the tokenizer can emit.
    mask_token_id        the absorbing state; null for ar, and for mdm_prime, whose mask is a digit.
    max_position_embeddings   tokens per sequence in training. Nothing forbids longer ones.
    rope_base, rope_layout    angle of pair r at position p: p * rope_base^(-2r / head width); how coordinates make pairs.
    schedule_eps         e of the log-linear schedule alpha_t = 1 - (1 - e) t in training.
    low_variance         training minimised the masked cross-entropy with weight 1 instead of 1/t.
    alpha_0, clean_order Eso-LM: share of tokens that diffusion generates; how the clean tokens of a noised text were reordered.
    latent, schedule_hidden, self_conditioning, output_prior   RePlaid: width of an embedding, of the schedule's network; whether the network
                         reads its previous estimate; how much of the evidence of z_t is added to the logits (1, or less while it grew; 0: none).
    digits, digit_base, digit_join, carry_over, shuffle_seed   MDM-Prime-v2. The code itself, id -> number, is the buffer `constants.digit_code`.
    prompt_table         RePlaid: prompts are read from a table of their own (fine-tuned models).
    prompt_format        how a fine-tuned model is asked: the segments of prompt and response, each tokenised apart; null for others.
    sampling             defaults of `LanguageModel.sample`.
    provenance           where the weights come from: step, tokens, hashes, versions.
    """

    model_type = "pretrain_language_model"
    _auto_class = "AutoConfig"  # so that save_pretrained copies the code
    keys_to_ignore_at_inference = ["past_key_values", "cache", "nelbo", "nelbo_label"]

    def __init__(
        self,
        objective: str = "ar",
        backbone: str = "llama",
        vocab_size: int = 256,
        tokenizer_size: int | None = None,
        mask_token_id: int | None = None,
        hidden_size: int = 128,
        num_hidden_layers: int = 2,
        num_attention_heads: int = 4,
        num_key_value_heads: int | None = None,
        intermediate_size: int | None = None,
        max_position_embeddings: int = 2048,
        qk_norm: bool = False,
        cond_dim: int = 128,
        rope_base: float = 10000.0,
        rope_layout: str = ROPE_LAYOUT,
        norm_eps: float = 1e-5,
        fp32_residual: bool = True,
        schedule_eps: float = 1e-3,
        low_variance: bool = False,
        alpha_0: float = 1.0,
        clean_order: str = "shuffled",
        latent: int = 16,
        schedule_hidden: int = 1024,
        self_conditioning: bool = True,
        output_prior: float = 1.0,
        prompt_table: bool = False,
        digits: int = 1,
        digit_base: int = 2,
        digit_join: str = "concat_shared",
        carry_over: bool = True,
        shuffle_seed: int | None = None,
        sampling: dict[str, Any] | None = None,
        prompt_format: dict[str, Any] | None = None,
        provenance: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if objective not in OBJECTIVES:
            raise ValueError(f"objective {objective!r} is none of {', '.join(OBJECTIVES)}")
        if rope_layout != ROPE_LAYOUT:
            raise ValueError(f"rope_layout {rope_layout!r} is not {ROPE_LAYOUT!r}, the only one that this network computes")
        self.objective, self.backbone = objective, backbone
        self.vocab_size, self.tokenizer_size, self.mask_token_id = vocab_size, tokenizer_size or vocab_size, mask_token_id
        self.hidden_size, self.num_hidden_layers, self.num_attention_heads = hidden_size, num_hidden_layers, num_attention_heads
        self.num_key_value_heads = num_key_value_heads or num_attention_heads
        self.intermediate_size = intermediate_size or 4 * hidden_size
        self.max_position_embeddings = max_position_embeddings
        self.qk_norm, self.cond_dim, self.norm_eps, self.fp32_residual = qk_norm, cond_dim, norm_eps, fp32_residual
        self.rope_base, self.rope_layout = rope_base, rope_layout
        self.schedule_eps, self.low_variance, self.alpha_0, self.clean_order = schedule_eps, low_variance, alpha_0, clean_order
        self.latent, self.schedule_hidden = latent, schedule_hidden
        self.self_conditioning, self.output_prior, self.prompt_table = self_conditioning, output_prior, prompt_table
        self.digits, self.digit_base, self.digit_join, self.carry_over = digits, digit_base, digit_join, carry_over
        self.shuffle_seed = shuffle_seed
        self.sampling, self.provenance = dict(sampling or {}), dict(provenance or {})
        self.prompt_format = None if prompt_format is None else dict(prompt_format)
        kwargs.setdefault("tie_word_embeddings", False)
        super().__init__(**kwargs)

    def network(self) -> NetworkConfig:
        """The shape of the network alone. Raises ValueError for an impossible one."""
        reads: Any = {"mdm_prime": "digits", "replaid": "latents"}.get(self.objective, "tokens")
        kind: Any = self.backbone
        join: Any = self.digit_join
        return NetworkConfig(
            kind=kind,
            vocab_size=self.vocab_size,
            hidden=self.hidden_size,
            layers=self.num_hidden_layers,
            heads=self.num_attention_heads,
            kv_heads=self.num_key_value_heads,
            ffn=self.intermediate_size,
            qk_norm=self.qk_norm,
            cond_dim=self.cond_dim,
            rope_base=self.rope_base,
            norm_eps=self.norm_eps,
            fp32_residual=self.fp32_residual,
            reads=reads,
            digits=self.digits,
            digit_base=self.digit_base,
            digit_join=join,
            latent=self.latent,
            prompt_table=self.prompt_table,
        )
