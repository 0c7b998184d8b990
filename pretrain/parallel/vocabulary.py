"""The three vocabulary sizes of a run, kept apart: tokenizer <= model <= padded."""

from dataclasses import dataclass

from pretrain.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """Sizes and special ids.

    tokenizer_size  ids that the tokenizer can emit.
    model_size      classes of the model: the tokenizer's ids, and the mask id when the objective has one. The K of Duo.
    padded_size     rows of the embedding and the head. Rows >= model_size exist for the hardware only and never win probability.
    mask_id         the absorbing state, or None (AR). It must not be an id that the tokenizer emits.
    eos_id          document separator.
    """

    tokenizer_size: int
    model_size: int
    padded_size: int
    mask_id: int | None
    eos_id: int

    def __post_init__(self) -> None:
        if not 0 < self.tokenizer_size <= self.model_size <= self.padded_size:
            raise UserError(
                f"vocabulary sizes must satisfy tokenizer <= model <= padded, got {self.tokenizer_size}, "
                f"{self.model_size}, {self.padded_size}; let the model size be computed from the tokenizer"
            )
        if self.mask_id is not None and not 0 <= self.mask_id < self.model_size:
            raise UserError(f"mask id {self.mask_id} lies outside the model vocabulary [0, {self.model_size}); use {self.model_size - 1}")
        if self.mask_id == self.eos_id:
            raise UserError(f"mask id {self.mask_id} is the end-of-document token; choose an id that no text uses, for example {self.tokenizer_size}")

    @staticmethod
    def padded(model_size: int, multiple: int) -> int:
        """The smallest multiple of `multiple` that holds `model_size` rows."""
        return -(-model_size // multiple) * multiple
