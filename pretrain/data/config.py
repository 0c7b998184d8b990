"""What a run reads. No torch here: configuration must load in milliseconds."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """One prepared corpus and its share of the tokens.

    path    folder written by launchers/prepare_data.py (manifest.json, *.bin, *.idx).
    weight  relative share of the mixture; where data.phases gives the shares, it stays 1.
    """

    path: str
    weight: float = 1.0


@dataclass(frozen=True, kw_only=True)
class PhaseConfig:
    """A part of a run that reads its sources in fixed shares.

    until  input tokens of the run after which the next phase begins, at the first step that lies wholly behind them; None: no next phase.
    mix    name of a source in data.train -> relative share of the tokens; 0, or a source that is not named: not read in this phase.
    """

    until: float | None = None
    mix: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Corpora, packing and the loader.

    train, validation           name -> source. Validation reads each source once, whole.
    phases                      the mixture, phase after phase, in order; empty: one phase of the sources' weights. A source goes on in the next phase
                                where it stopped in the last.
    max_epochs                  passes over a source above which a run is refused before it starts (repeating text up to 4 times costs little:
                                Muennighoff et al. 2023, "Scaling Data-Constrained Language Models"); None: any number.
    document_masks              positions see only their own document (recorded with the run, used in training and validation alike).
    random_length_probability   share of sequences cut to a length drawn from U{1..L} (scaling-dllms: 0.01 in the 1.7B runs; never for AR).
    loader                      dali: prefetch through NVIDIA DALI; plain: a Python thread. Both give identical batches.
    prefetch                    global batches prepared ahead.
    workers                     threads of each rank that read and noise samples: more where steps wait for data. Batches do not depend on it.
    """

    train: dict[str, SourceConfig] = field(default_factory=dict)
    validation: dict[str, SourceConfig] = field(default_factory=dict)
    phases: list[PhaseConfig] = field(default_factory=list)
    max_epochs: float | None = 4.0
    document_masks: bool = False
    random_length_probability: float = 0.0
    loader: Literal["dali", "plain"] = "dali"
    prefetch: int = 2
    workers: int = 1
