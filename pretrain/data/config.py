"""What a run reads. No torch here: configuration must load in milliseconds."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """One prepared corpus and its share of the tokens.

    path    folder written by launchers/prepare_data.py (manifest.json, *.bin, *.idx).
    weight  relative share of the mixture.
    """

    path: str
    weight: float = 1.0


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Corpora, packing and the loader.

    train, validation           name -> source. Validation reads each source once, whole.
    document_masks              positions see only their own document (recorded with the run, used in training and validation alike).
    random_length_probability   share of sequences cut to a length drawn from U{1..L} (scaling-dllms: 0.01 in the 1.7B runs; never for AR).
    loader                      dali: prefetch through NVIDIA DALI; plain: a Python thread. Both give identical batches.
    prefetch                    global batches prepared ahead.
    """

    train: dict[str, SourceConfig] = field(default_factory=dict)
    validation: dict[str, SourceConfig] = field(default_factory=dict)
    document_masks: bool = False
    random_length_probability: float = 0.0
    loader: Literal["dali", "plain"] = "dali"
    prefetch: int = 2
