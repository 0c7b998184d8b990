"""What launchers/convert.py takes, one dataclass per task. No torch here."""

from dataclasses import dataclass
from typing import Literal

from pretrain.errors import UserError

_SMALLEST_SHARD = 1_000_000


@dataclass(frozen=True, kw_only=True)
class HubConfig:
    """A checkpoint of any layout out, as a folder that `transformers` loads.

    checkpoint       a run directory (runs/NAME): its newest complete checkpoint; or one checkpoint's folder.
    step             which checkpoint of the run directory; None: the newest complete one.
    output           folder to make; it must not exist.
    format           own: any objective and backbone, with its code (trust_remote_code). stock: LlamaForCausalLM or Qwen3ForCausalLM, for the
                     autoregressive Llama-style network.
    weights          ema: the average of the weights; raw: the weights themselves; auto: the average where the run keeps one.
    dtype            of the weights in the files; the objective's own are fp32 or wider.
    max_shard_bytes  size of a weight file at most (a tensor that is larger has a file of its own).
    text             a text file whose beginning the gate reads as real text; None: the run's held-out text.
    """

    checkpoint: str
    output: str
    step: int | None = None
    format: Literal["own", "stock"] = "own"
    weights: Literal["auto", "ema", "raw"] = "auto"
    dtype: Literal["fp32", "bf16"] = "fp32"
    max_shard_bytes: int = 5_000_000_000
    text: str | None = None

    def __post_init__(self) -> None:
        _require_given(checkpoint=self.checkpoint, output=self.output)
        if self.max_shard_bytes < _SMALLEST_SHARD:
            raise UserError(f"max_shard_bytes={self.max_shard_bytes} must be at least {_SMALLEST_SHARD:,}; leave it out for 5 GB")


@dataclass(frozen=True, kw_only=True)
class ImportConfig:
    """A folder that `transformers` loads in, as a checkpoint from which runs of any layout start (init_from=).

    source          an export of this program, or a LlamaForCausalLM or Qwen3ForCausalLM with safetensors and tokenizer.json.
    output          run directory to make (runs/NAME); it must not exist.
    vocab_multiple  the padded vocabulary becomes a multiple of this (backbone.vocab_multiple of the runs to come).
    """

    source: str
    output: str
    vocab_multiple: int = 128

    def __post_init__(self) -> None:
        _require_given(source=self.source, output=self.output)
        if self.vocab_multiple < 1:
            raise UserError(f"vocab_multiple={self.vocab_multiple} must be at least 1; leave it out for 128")


def _require_given(**paths: str) -> None:
    for key, value in paths.items():
        if not value.strip():
            raise UserError(f"{key} is empty; give a folder")
