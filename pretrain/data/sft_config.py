"""What a fine-tuning run reads. No torch here: configuration must load in milliseconds."""

from dataclasses import dataclass, field

from pretrain.data.sft_format import SFTFormat


@dataclass(frozen=True, kw_only=True)
class SFTConfig:
    """Fine-tuning on problems with worked answers (launchers/finetune.py).

    train       problems to learn: a file that launchers/prepare_data.py gsm8k or gsm_symbolic wrote.
    validation  held-out problems for the likelihood of their answers; None: no validation.
    epochs      how often each example is read; the run's length follows from it.
    format      how a problem becomes prompt and response.
    """

    train: str
    validation: str | None = None
    epochs: int = 5
    format: SFTFormat = field(default_factory=SFTFormat)
