"""Where a model's weights come from: what its run's files say, and nothing else."""

from pathlib import Path
from typing import Any

from pretrain.checkpoint.layout import TrainState
from pretrain.checkpoint.logical import IMPORTED
from pretrain.convert.plain_network import TrainedModel
from pretrain.data.files import file_hash
from pretrain.data.manifest import FILE_NAME
from pretrain.data.sft_config import SFTConfig
from pretrain.errors import UserError
from pretrain.telemetry.log import LOG_NAME, read_log

UNREACHABLE = "not reachable when this was exported"


def provenance_of(trained: TrainedModel, key: str) -> dict[str, Any]:
    """step and tokens of the checkpoint, kind of weights, versions of code and libraries, hashes of tokenizer and data manifests."""
    state = TrainState.read(trained.folder)
    imported = {"imported": state.extras[IMPORTED]} if IMPORTED in state.extras else {}
    return {
        "run": trained.run.name,
        "step": state.step,
        "tokens": state.tokens,
        "weights": "average (ema)" if key == "ema" else "raw",
        "code": state.versions.get("pretrain", "unknown"),
        "versions": {name: version for name, version in state.versions.items() if name != "pretrain"},
        "tokenizer_blake2b": trained.tokenizer.hash,
        "data_manifests_blake2b": {name: _manifest_hash(Path(source.path)) for name, source in sorted(trained.run.data.train.items())},
        **({"problems_blake2b": _problem_hashes(trained.run.sft)} if trained.run.sft is not None else {}),
        **imported,
    }


def validations(trained: TrainedModel) -> list[dict[str, Any]]:
    """The newest record of the held-out likelihood at or before the checkpoint's step, from the run's log; none where there is no such record."""
    try:
        records = [r for r in read_log(trained.run_directory / LOG_NAME) if r.get("kind") == "validation" and r["step"] <= trained.step]
    except UserError:
        return []
    return records[-1:]


def _problem_hashes(sft: SFTConfig) -> dict[str, str]:
    files = {"sft.train": sft.train} | ({"sft.validation": sft.validation} if sft.validation is not None else {})
    return {key: _hash(Path(path)) for key, path in files.items()}


def _hash(path: Path) -> str:
    try:
        return file_hash(path)
    except OSError:
        return UNREACHABLE


def _manifest_hash(folder: Path) -> str:
    return _hash(folder / FILE_NAME)
