"""What launchers/convert.py takes, one dataclass per task. No torch here."""

from dataclasses import dataclass, field
from typing import Literal

from pretrain.errors import UserError
from pretrain.parallel.config import ParallelConfig

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
        _require_shard(self.max_shard_bytes)


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


@dataclass(frozen=True, kw_only=True)
class UniversalConfig:
    """A checkpoint of any layout as logical tensors, which fill every layout.

    checkpoint  a run directory (runs/NAME): its newest complete checkpoint; or one checkpoint's folder.
    step        which checkpoint of the run directory; None: the newest complete one.
    output      run directory to make; it must not exist.
    """

    checkpoint: str
    output: str
    step: int | None = None

    def __post_init__(self) -> None:
        _require_given(checkpoint=self.checkpoint, output=self.output)


@dataclass(frozen=True, kw_only=True)
class ZeroConfig:
    """A checkpoint as DeepSpeed's ZeRO files of a named layout.

    source       what `universal` made, or any checkpoint: a run directory or one checkpoint's folder.
    step      which checkpoint of the run directory; None: the newest complete one.
    output    run directory to make; it must not exist.
    parallel     the layout, as for a run.
    data_ranks   data-parallel ranks; `data` alone is Hydra's group of corpora.
    """

    source: str
    output: str
    step: int | None = None
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data_ranks: int = 1

    def __post_init__(self) -> None:
        _require_given(source=self.source, output=self.output)
        if self.data_ranks < 1:
            raise UserError(f"data_ranks={self.data_ranks} must be at least 1, the number of data-parallel ranks; leave it out for 1")


@dataclass(frozen=True, kw_only=True)
class WeightsConfig:
    """The weights of a checkpoint of any layout, alone, as safetensors by logical name.

    checkpoint, step, output   as for a universal checkpoint.
    weights, dtype, max_shard_bytes   as for a hub folder.
    """

    checkpoint: str
    output: str
    step: int | None = None
    weights: Literal["auto", "ema", "raw"] = "auto"
    dtype: Literal["fp32", "bf16"] = "fp32"
    max_shard_bytes: int = 5_000_000_000

    def __post_init__(self) -> None:
        _require_given(checkpoint=self.checkpoint, output=self.output)
        _require_shard(self.max_shard_bytes)


def _require_shard(count: int) -> None:
    if count < _SMALLEST_SHARD:
        raise UserError(f"max_shard_bytes={count} must be at least {_SMALLEST_SHARD:,}; leave it out for 5 GB")


def _require_given(**paths: str) -> None:
    for key, value in paths.items():
        if not value.strip():
            raise UserError(f"{key} is empty; give a folder")
