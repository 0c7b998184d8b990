"""What a checkpoint is on disk: names of folders and files, and the run's state in JSON.

    runs/NAME/
      config.yaml, versions.json            the run as it was last started (resume.py)
      checkpoints/
        step_00012000/                      real only if COMPLETE is there and matches
          zero/                             DeepSpeed's files, one per rank
          objective.pt                      the objective's own parameters, if it has any
          train_state.json                  TrainState
          config.yaml                       the run's configuration when this was written
          manifest.json                     size and checksum of every file above
          COMPLETE                          checksum of manifest.json, written last
        step_00013000.partial/              being written, or left behind by a crash: never read
        step_00011000.deleting/             being deleted
        step_00012000.damaged-1/            failed verification: kept, never read

No torch here: listing and checking must be quick.
"""

import dataclasses
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pretrain.backbones.config import BackboneConfig
from pretrain.backbones.parameters import parameter_table
from pretrain.errors import UserError
from pretrain.parallel.config import ParallelConfig
from pretrain.parallel.sharding import ParameterSpec

FORMAT_VERSION = 1
CHECKPOINTS = "checkpoints"
ZERO = "zero"
TRAIN_STATE = "train_state.json"
CONFIG = "config.yaml"
VERSIONS = "versions.json"
MANIFEST = "manifest.json"
COMPLETE = "COMPLETE"
MEANT = "meant"
"""In TrainState.extras: key -> what its value stood for on the machine that wrote the checkpoint (see changes.changes)."""
PARTIAL = ".partial"
DELETING = ".deleting"
DAMAGED = ".damaged"

_NAME = re.compile(r"step_(\d{8,})")


def step_name(step: int) -> str:
    """Folder name of the checkpoint after `step` optimizer steps."""
    return f"step_{step:08d}"


def step_of(name: str) -> int | None:
    """The step in a checkpoint's folder name; None for anything else (partial, damaged, foreign)."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Over which ranks a run is spread: tensor, pipeline, virtual pipeline and data parallelism, and DeepSpeed's ZeRO stage."""

    tensor: int
    pipeline: int
    virtual_pipeline: int
    data: int
    zero_stage: int

    @staticmethod
    def of(parallel: ParallelConfig, data: int) -> "Layout":
        """The layout of a run over `data` data-parallel ranks."""
        return Layout(
            tensor=parallel.tensor, pipeline=parallel.pipeline, virtual_pipeline=parallel.virtual_pipeline, data=data, zero_stage=parallel.zero_stage
        )

    def __str__(self) -> str:
        chunks = f"x{self.virtual_pipeline}" if self.virtual_pipeline > 1 else ""
        return f"TP{self.tensor} PP{self.pipeline}{chunks} DP{self.data} ZeRO-{self.zero_stage}"


@dataclass(frozen=True, kw_only=True)
class TrainState:
    """What a run needs to go on, besides tensors. Everything else is a pure function of these and the configuration.

    step       optimizer steps done.
    tokens     input tokens consumed.
    samples    samples consumed: the index of the next one, which is all the state that the data has.
    lr         learning rate of the last step done (compared with the schedule on resume).
    next_batch fingerprint of the batch of step `step` (compared on resume).
    seed       the run's seed.
    layout     how the ZeRO files are cut.
    backbone   BackboneConfig as a dictionary.
    rows       rows of embedding and head (padded vocabulary size).
    versions   package name -> version, of the program that wrote this.
    extras     small JSON values of other parts, by name.
    milestone  the first checkpoint at or after a multiple of checkpoint.milestone_tokens: never pruned, whatever the setting becomes.
    """

    step: int
    tokens: int
    samples: int
    lr: float
    next_batch: str
    seed: int
    layout: Layout
    backbone: dict[str, Any]
    rows: int
    versions: dict[str, str] = field(default_factory=dict)
    extras: dict[str, Any] = field(default_factory=dict)
    milestone: bool = False

    def to_json(self) -> str:
        """Text of train_state.json."""
        return json.dumps({"format": FORMAT_VERSION} | dataclasses.asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str, source: Path) -> "TrainState":
        """The inverse of `to_json`. Raises UserError naming `source` if the text is no state of this format."""
        try:
            values = json.loads(text)
            version = values.pop("format")
            if version > FORMAT_VERSION:
                raise UserError(f"{source} has format {version}, this program reads up to {FORMAT_VERSION}; use the program version that wrote it")
            return cls(**values | {"layout": Layout(**values["layout"])})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{source} is not a training state of this program ({error}); use another checkpoint") from None

    @classmethod
    def read(cls, checkpoint: Path) -> "TrainState":
        """The state in a checkpoint folder. Raises UserError if it is missing or unreadable."""
        path = checkpoint / TRAIN_STATE
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not text"
            raise UserError(f"{path} cannot be read ({reason}); name a checkpoint folder such as runs/NAME/checkpoints/step_00001000") from None
        return cls.from_json(text, path)

    def table(self) -> dict[str, ParameterSpec]:
        """Logical name -> specification of every parameter in the checkpoint."""
        return parameter_table(BackboneConfig.from_dict(self.backbone), self.rows)
