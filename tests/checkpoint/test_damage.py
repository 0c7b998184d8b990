"""Every file of a real checkpoint damaged in every way: named before training starts, and the checkpoint before it used; forged ones run nothing."""

import io
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pretrain.checkpoint.files import FileRecord, content, inspect, manifest_text, marker_text
from pretrain.checkpoint.layout import COMPLETE, MANIFEST, step_name
from pretrain.checkpoint.manager import CheckpointManager, find_checkpoint
from pretrain.convert.held_out import load_objective
from pretrain.convert.plain_network import open_trained
from pretrain.errors import UserError
from pretrain.run_config import CheckpointConfig, DurationConfig, ValidationConfig
from tests.distributed import run_distributed
from tests.small_run import small_config, train


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a RePlaid run, whose objective has a file of its own, stopped after steps 2 and 4 of 6."""
    folder = tmp_path_factory.mktemp("trained")
    run_distributed(train, 1, replace(config_in(folder), duration=DurationConfig(steps=6, stop_after=4)))
    return folder


def config_in(folder: Path):  # type: ignore[no-untyped-def]
    return small_config(folder, "replaid", checkpoint=CheckpointConfig(every=2), validation=ValidationConfig(every=6))


def flip(place: Callable[[int], int]) -> Callable[[Path], None]:
    def harm(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[place(len(data))] ^= 0x10
        path.write_bytes(data)

    return harm


HARMS: dict[str, Callable[[Path], object]] = {
    "first byte": flip(lambda size: 0),
    "middle byte": flip(lambda size: size // 2),
    "last byte": flip(lambda size: size - 1),
    "truncated by one": lambda path: os.truncate(path, path.stat().st_size - 1),
    "truncated by half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "one byte more": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "empty": lambda path: os.truncate(path, 0),
    "missing": Path.unlink,
}


@pytest.mark.parametrize("harm", HARMS)
def test_any_damage_to_any_file_is_named_and_the_one_before_used(trained: Path, tmp_path: Path, harm: str) -> None:
    run = config_in(trained).directory
    newest = Path("checkpoints") / step_name(4)
    names = [*content(run / newest), MANIFEST, COMPLETE]
    assert len(names) == 7, names
    for number, name in enumerate(names):
        copy = tmp_path / str(number)
        shutil.copytree(run, copy)
        HARMS[harm](copy / newest / name)
        with pytest.raises(UserError, match="is damaged: ") as caught:
            find_checkpoint(copy / newest)
        assert name in str(caught.value) or (name == COMPLETE and MANIFEST in str(caught.value))
        said: list[str] = []
        found = CheckpointManager(copy, 3, say=said.append).begin("auto")
        assert found is not None and found.step == 2, f"{harm} of {name}"
        assert (name in said[0] or (name == COMPLETE and MANIFEST in said[0])) and "step_00000004.damaged-1" in said[0], said
        assert found.folder.name in said[1]


def test_a_file_too_many_is_damage_and_a_hidden_one_is_not(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(config_in(trained).directory, tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints" / step_name(4)
    (folder / "zero" / ".nfs0001").touch()
    assert inspect(folder) == []
    (folder / "zero" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").touch()
    assert [str(damage) for damage in inspect(folder)] == ["zero/zero_pp_rank_1_mp_rank_00_optim_states.pt is not in the manifest"]
    found = CheckpointManager(tmp_path / "run", 3, say=lambda text: None).begin("auto")
    assert found is not None and found.step == 2


# ---- forgery ------------------------------------------------------------------------------------------------------------------------


class Payload:
    """Makes a folder when it is unpickled freely."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (self.path,)


def sealed(folder: Path) -> None:
    """Write manifest and marker again, as whoever forges a file would."""
    (folder / MANIFEST).write_text(manifest_text(4, [FileRecord.of(folder, name) for name in content(folder)]))
    (folder / COMPLETE).write_text(marker_text(folder))


def in_torch_save(path: Path, proof: Path) -> None:
    """The file as it was, with one more entry."""
    with torch.serialization.safe_globals([]):
        state = torch.load(path, weights_only=False)
    torch.save(state | {"added": Payload(proof)}, path)


def in_its_pickle(path: Path, proof: Path) -> None:
    """The archive as it was, but for the pickle in it."""
    before, after = zipfile.ZipFile(path), io.BytesIO()
    with zipfile.ZipFile(after, "w") as archive:
        for name in before.namelist():
            archive.writestr(name, pickle.dumps(Payload(proof), protocol=2) if name.endswith("data.pkl") else before.read(name))
    path.write_bytes(after.getvalue())


def as_a_bare_pickle(path: Path, proof: Path) -> None:
    """What torch.save wrote before it wrote archives."""
    path.write_bytes(pickle.dumps(Payload(proof), protocol=2))


def refusal(config) -> str:  # type: ignore[no-untyped-def]
    try:
        train(config)
    except UserError as error:
        return str(error)
    return "trained"


PICKLED = ("zero/mp_rank_00_model_states.pt", "zero/zero_pp_rank_0_mp_rank_00_optim_states.pt", "objective.pt")


@pytest.mark.parametrize("forge", [in_torch_save, in_its_pickle, as_a_bare_pickle])
@pytest.mark.parametrize("name", PICKLED)
def test_no_forged_file_is_executed(trained: Path, tmp_path: Path, name: str, forge: Callable[[Path, Path], None]) -> None:
    """Checksums prove nothing here: the forger has written them anew. Resuming, in the same layout and in another, sampling, evaluating."""
    proof = tmp_path / "executed"
    for each in ("small.model", "train", "held_out"):
        (tmp_path / each).symlink_to(trained / each)
    config = config_in(tmp_path)
    shutil.copytree(config_in(trained).directory, config.directory)
    folder = config.directory / "checkpoints" / step_name(4)
    forge(folder / name, proof)
    sealed(folder)
    assert inspect(folder) == []
    assert set(PICKLED) == {each for each in content(folder) if each.endswith(".pt")}
    found = find_checkpoint(config.directory)
    assert found.step == 4
    sentences = [run_distributed(refusal, 1, config)[0]]
    if name != PICKLED[0]:  # another layout, samples and likelihoods are made of the master weights
        sentences.append(run_distributed(refusal, 1, replace(config, optimizer=replace(config.optimizer, eps=1e-7), resume="changed"))[0])
        with pytest.raises(UserError) as caught:
            model = open_trained(config.directory)
            load_objective(objective_of(config), model.folder)
            model.network(device=torch.device("cpu"), dtype=torch.float32)
        sentences.append(str(caught.value))
    assert not proof.exists(), "the forged file was executed"
    for sentence in sentences:
        assert Path(name).name in sentence and "\n" not in sentence, sentence
        assert "mkdir when it is read" in sentence or (forge is as_a_bare_pickle and "cannot be read" in sentence), sentence


def test_a_file_that_one_rank_alone_reads_stops_all(tmp_path: Path) -> None:
    config = small_config(tmp_path, validation=ValidationConfig(every=6))
    run_distributed(train, 2, replace(config, duration=DurationConfig(steps=6, stop_after=4)))
    folder = config.directory / "checkpoints" / step_name(4)
    in_its_pickle(folder / "zero" / "zero_pp_rank_1_mp_rank_00_optim_states.pt", tmp_path / "executed")
    sealed(folder)
    first, second = run_distributed(refusal, 2, config, timeout=60)
    assert first == second and "zero_pp_rank_1_mp_rank_00_optim_states.pt asks to run posix.mkdir" in first
    assert not (tmp_path / "executed").exists()


def objective_of(config):  # type: ignore[no-untyped-def]
    from pretrain.build import build_objective
    from pretrain.data.tokenizer import Tokenizer
    from pretrain.rules import run_vocabulary

    return build_objective(config.objective, run_vocabulary(config, Tokenizer(config.tokenizer)))


def test_nothing_in_the_program_unpickles_freely_or_trusts_remote_code() -> None:
    root = Path(__file__).resolve().parents[2]
    for package in ("pretrain", "finetune", "data_prep", "launchers"):
        for path in (root / package).rglob("*.py"):
            text = path.read_text()
            # A model card and a docstring tell their reader how to load an export; the gate loads code that this program has just copied.
            trust = [] if path.name in ("model_card.py", "modeling_language_model.py", "gate_hub.py") else ["trust_remote_code=True"]
            for words in ("weights_only=False", "pickle.load", "torch.hub", *trust):
                assert words not in text, f"{path} has {words}"
            assert text.count("torch.load(") == text.count("weights_only=True"), path
