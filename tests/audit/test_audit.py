"""What a run read, told again from its directory: against what its ranks really handled."""

import dataclasses
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pretrain.audit.config import ShowConfig, StepAuditConfig
from pretrain.audit.documents import documents
from pretrain.audit.noised import data_rank, micro_batches, sample_record
from pretrain.audit.run import AuditedRun
from pretrain.data.config import SourceConfig
from pretrain.data.corpus import Corpus
from pretrain.errors import UserError
from pretrain.objectives.config import DuoConfig, EsoLMConfig, MDMPrimeConfig, ObjectiveConfig
from pretrain.parallel.config import ParallelConfig
from pretrain.run_config import DurationConfig, RunConfig
from tests.distributed import run_distributed
from tests.small_run import small_config

OBJECTIVES = {
    "ar": ObjectiveConfig(name="ar"),
    "mdlm": ObjectiveConfig(name="mdlm"),
    "duo": ObjectiveConfig(name="duo"),
    "duo_curriculum": ObjectiveConfig(name="duo", duo=DuoConfig(curriculum="topk", top_k=4)),
    "esolm": ObjectiveConfig(name="esolm", esolm=EsoLMConfig(alpha_0=0.5)),
    "replaid": ObjectiveConfig(name="replaid"),
    "mdm_prime": ObjectiveConfig(name="mdm_prime", mdm_prime=MDMPrimeConfig(digits=9)),
}


def handled(config: RunConfig) -> dict[int, dict[str, dict[str, Any]]]:
    """Train; per step (from 1) and sample number, the arrays that this rank's engine got."""
    from pretrain.parallel import groups as parallel_groups
    from pretrain.trainer import Trainer

    trainer = Trainer(config, parallel_groups.initialize(config.parallel, seed=config.seed))
    found: dict[int, dict[str, dict[str, Any]]] = {}
    stepped = trainer.engine.train_step

    def watching(shard: Any, lr: float) -> Any:
        for batch in shard.micro_batches:
            for row, number in enumerate(batch.sample_ids):
                for part, tensors in (("inputs", batch.inputs), ("targets", batch.targets)):
                    arrays = {key: value[row].numpy().copy() for key, value in tensors.items()}
                    found.setdefault(shard.step + 1, {}).setdefault(str(number), {})[part] = arrays
        return stepped(shard, lr)

    trainer.engine.train_step = watching  # type: ignore[method-assign]
    trainer.fit()
    trainer.close()
    return found


def assert_shown(record: dict[str, Any], seen: dict[str, dict[str, np.ndarray]]) -> None:
    for part in ("inputs", "targets"):
        for key, value in seen[part].items():  # `documents` is left out where no mask is needed
            assert np.array_equal(np.asarray(record[part][key]), value), (part, key)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_show_decodes_what_the_rank_handled(tmp_path: Path, name: str) -> None:
    config = small_config(tmp_path, OBJECTIVES[name], duration=DurationConfig(steps=6, stop_after=2))
    seen = run_distributed(handled, 1, config)[0]
    for step in (1, 2):
        run = AuditedRun(config.directory, step)
        assert data_rank(run, 0, None) == (0, 1)
        numbers = [number for numbers in micro_batches(run, 0, 1) for number in numbers]
        assert numbers == [int(number) for number in seen[step]] == list(range(8 * (step - 1), 8 * step))
        for number in numbers:
            record = json.loads(json.dumps(sample_record(run, number, None)))
            assert_shown(record, seen[step][str(number)])
            assert_described(name, run, record)


def test_a_step_that_was_not_trained_is_called_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = small_config(tmp_path, "ar", duration=DurationConfig(steps=6, stop_after=2))
    run_distributed(handled, 1, config)
    capsys.readouterr()
    for step in (1, 2):
        AuditedRun(config.directory, step).say_if_planned()
    assert capsys.readouterr().err == ""
    AuditedRun(config.directory, 3).say_if_planned()
    said = capsys.readouterr().err
    assert said.startswith("note: nothing shows that step 3 was trained: log and checkpoints of ")
    assert said.endswith(" end at step 2; this is what it would read\n")


def assert_described(name: str, run: AuditedRun, record: dict[str, Any]) -> None:
    """The words against the arrays."""
    address = run.samples.mixture.address(record["sample"])
    tokens = run.samples.text(address)[0][:16]
    if name != "mdm_prime":  # whose padding reads as id 0
        assert record["clean"] == repr(run.tokenizer.decode([tokens.tolist()])[0])[1:-1]
    notes = " ".join(record["notes"])
    targets = {key: np.asarray(value) for key, value in record["targets"].items()}
    marks = [int(match or 1) for match in re.findall(r"‹mask›(?:x(\d+))?", record["noised"])]
    if name in ("mdlm", "esolm"):
        assert sum(marks) == targets["masked"].sum() and f"scored: {targets['masked'].sum()} of 16" in notes
        assert f"weight {float(targets['loss_weight']):.6g} in the loss" in notes
    elif name.startswith("duo"):
        replaced = int((targets["ids"] != targets["noisy"]).sum())
        assert f"replaced: {replaced} of 16" in notes and ("4 weighted ids" in notes) == (name == "duo_curriculum")
        assert ("→" in record["noised"]) == (replaced > 0)
    elif name == "mdm_prime":
        whole = targets["masked"].all(1)
        assert sum(marks) == whole.sum() and f"digits masked: {targets['masked'].sum()} of 144" in notes
        assert record["noised"].count("?") == targets["masked"][~whole].sum()
    elif name == "replaid":
        assert "gamma" in notes and "t " in notes
    else:
        assert f"{targets['scored'].sum()} of 16 positions" in notes


def test_replaid_shows_the_time_of_the_schedule_that_the_step_had(tmp_path: Path) -> None:
    """After a checkpoint of the step before, t, gamma and weight are those of that step's forward pass."""
    config = small_config(tmp_path, "replaid", duration=DurationConfig(steps=6, stop_after=4))
    times = run_distributed(prepared_times, 1, config)[0]
    run = AuditedRun(config.directory, 4)
    assert run.earlier[-1].state.step == 3
    for number, (t, g, weight) in times.items():
        record = sample_record(run, number, None)
        found = re.search(r"t ([\d.e+-]+), gamma ([\d.e+-]+), weight ([\d.e+-]+), by the schedule as learned by step 3", record["notes"][0])
        assert found, record["notes"]
        assert [float(value) for value in found.groups()] == pytest.approx([t, g, weight], rel=1e-4, abs=1e-6)


def prepared_times(config: RunConfig) -> dict[int, tuple[float, float, float]]:
    """sample -> t, gamma, weight in the fourth step."""
    from pretrain.parallel import groups as parallel_groups
    from pretrain.trainer import Trainer

    trainer = Trainer(config, parallel_groups.initialize(config.parallel, seed=config.seed))
    prepare, found, step = trainer.objective.prepare, {}, 0
    stepped = trainer.engine.train_step

    def counting(shard: Any, lr: float) -> Any:
        nonlocal step
        step = shard.step + 1
        return stepped(shard, lr)

    def watching(inputs: Any, targets: Any, *, evaluation: bool) -> Any:
        answer = prepare(inputs, targets, evaluation=evaluation)
        if step == 4 and not evaluation:
            for row, place in enumerate(inputs["place"].tolist()):
                found[24 + place] = tuple(float(answer[1][key][row].detach()) for key in ("t", "g", "weight"))
        return answer

    trainer.engine.train_step, trainer.objective.prepare = counting, watching  # type: ignore[method-assign]
    trainer.fit()
    trainer.close()
    return found


def test_ranks_of_another_layout_are_told_apart(tmp_path: Path) -> None:
    config = small_config(tmp_path, parallel=ParallelConfig(tensor=2), duration=DurationConfig(steps=6, stop_after=1))
    seen = run_distributed(handled, 4, config)
    run = AuditedRun(config.directory, 1)
    for rank in range(4):
        numbers = [str(number) for numbers in micro_batches(run, *data_rank(run, rank, None)) for number in numbers]
        assert numbers == list(seen[rank][1])
    with pytest.raises(UserError, match=r"rank=4 must be below the 4 ranks that trained the step"):
        data_rank(run, 4, None)
    with pytest.raises(UserError, match=r"world=3 must be a multiple of .* = 2; use world=2"):
        data_rank(run, 0, 3)
    assert data_rank(run, 5, 8) == (2, 4)


def test_documents_are_those_of_the_windows(tmp_path: Path) -> None:
    config = small_config(tmp_path, duration=DurationConfig(steps=6, stop_after=2))
    run_distributed(handled, 1, config)
    run = AuditedRun(config.directory, 2)
    rows = documents(run, 30)
    corpus = Corpus(config.data.train["words"].path)
    assert [(row["position"], row["sample"]) for row in rows] == [(place, 8 + place) for place in range(8)]
    for row in rows:
        address = run.samples.mixture.address(row["sample"])
        assert (row["source"], row["epoch"], row["window"]) == (address.source, address.epoch + 1, address.window)
        tokens, numbers = corpus.read(0, corpus.tokens)
        window = numbers[row["first_token"] : row["first_token"] + 16]
        assert [(row["documents"][0]["first"], row["documents"][-1]["last"])] == [(window[0], window[-1])]
        assert " ".join(run.tokenizer.decode([tokens[row["first_token"] :][:60].tolist()])[0].split()).startswith(row["text"])


def test_a_run_that_changed_its_mixture_is_told_as_it_was(tmp_path: Path) -> None:
    config = small_config(tmp_path, duration=DurationConfig(steps=6, stop_after=3))
    first = run_distributed(handled, 1, config)[0]
    held = SourceConfig(path=str(tmp_path / "held_out" / "corpus"))
    other = replace(config, data=replace(config.data, train={"other": held}), resume="changed", duration=DurationConfig(steps=6))
    second = run_distributed(handled, 1, other)[0]
    for step, seen in ((2, first), (5, second)):
        run = AuditedRun(config.directory, step)
        assert {row["source"] for row in documents(run, 0)} == ({"words"} if step == 2 else {"other"})
        for number, arrays in seen[step].items():
            assert_shown(sample_record(run, int(number), None), arrays)


def test_changed_text_and_what_is_missing_are_one_sentence(tmp_path: Path) -> None:
    config = small_config(tmp_path, duration=DurationConfig(steps=6, stop_after=2))
    with pytest.raises(UserError, match="there is no run at"):
        AuditedRun(config.directory, 1)
    run_distributed(handled, 1, config)
    AuditedRun(config.directory / "checkpoints" / "step_00000002", 1)
    elsewhere = dataclasses.asdict(config)
    elsewhere["data"]["train"]["words"]["path"] = str(tmp_path / "held_out" / "corpus")
    import yaml

    (config.directory / "checkpoints" / "step_00000002" / "config.yaml").write_text(yaml.safe_dump(elsewhere))
    with pytest.raises(UserError, match=r"is not what it was: the batch after step 2 differs from the one that .*step_00000002 remembers"):
        AuditedRun(config.directory, 1)
    shard = next((tmp_path / "train" / "corpus").glob("*.bin"))
    shard.write_bytes(shard.read_bytes()[:-2])
    with pytest.raises(UserError, match=r"data source 'words'.*cut off"):
        AuditedRun(config.directory, 3)


IMPOSSIBLE = [(StepAuditConfig, {"step": 0}), (ShowConfig, {"step": 1, "rank": -1}), (ShowConfig, {"step": 1, "run": " "})]


@pytest.mark.parametrize(("kind", "values"), IMPOSSIBLE)
def test_impossible_questions(kind: type, values: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        kind(**({"run": "runs/x"} | values))


@pytest.mark.slow
def test_commands(tmp_path: Path) -> None:
    config = small_config(tmp_path, duration=DurationConfig(steps=6, stop_after=2))
    run_distributed(handled, 1, config)

    def ask(*words: str) -> str:
        launcher = Path(__file__).parents[2] / "launchers" / "prepare_data.py"
        done = subprocess.run([sys.executable, str(launcher), *words], cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    table = ask("audit", "step=2", "run=runs/small")
    assert "Step 2 of runs/small: tokens 128 to 256" in table and "shard_00000" in table and "fingerprint" in table
    assert len([json.loads(line) for line in ask("audit", "step=2", "run=runs/small", "format=json").splitlines()]) == 8
    shown = ask("show", "step=2", "rank=0", "run=runs/small", "samples=2")
    assert shown.count("noised:") == 2 and "‹mask›" in shown
    assert torch.tensor(json.loads(ask("show", "step=1", "run=runs/small", "samples=1", "format=json"))["inputs"]["ids"]).shape == (16,)
