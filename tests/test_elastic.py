"""A run that is killed and goes on with other numbers of ranks reads what it would have read: with the real trainer."""

import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pretrain.data.config import DataConfig, PhaseConfig, SourceConfig
from pretrain.errors import UserError
from pretrain.run_config import CheckpointConfig, DurationConfig, RunConfig, ValidationConfig
from pretrain.telemetry.log import read_log
from tests.distributed import run_distributed, run_until_killed
from tests.small_run import small_config, train


def two_sources(folder: Path, *phases: PhaseConfig, **changes: Any) -> RunConfig:
    config = small_config(folder, validation=ValidationConfig(every=0), checkpoint=CheckpointConfig(every=1, keep=0, asynchronous=False), **changes)
    sources = {"words": config.data.train["words"], "other": SourceConfig(path=str(folder / "held_out" / "corpus"))}
    return replace(config, data=DataConfig(train=sources, phases=list(phases), max_epochs=None))


def reading(config: RunConfig, said: str, *, kill_at: int | None = None) -> list[str]:
    """Train; a line per sample in the file said.RANK; SIGKILL on every rank in step `kill_at`. The files that were opened for writing."""
    import torch.distributed as dist

    from pretrain.engine.zero import Engine

    stepped, opened = Engine.train_step, []

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            opened.append(str(arguments[0]))

    sys.addaudithook(hook)

    def watching(engine: Any, shard: Any, lr: float) -> Any:
        if shard.step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        with open(f"{said}.{dist.get_rank()}", "a") as out:
            for batch in shard.micro_batches:
                out.writelines(json.dumps([shard.step, number, float(batch.t_B[row])]) + "\n" for row, number in enumerate(batch.sample_ids))
        return stepped(engine, shard, lr)

    Engine.train_step = watching  # type: ignore[method-assign]
    train(config)
    return opened


def lines(said: Path, ranks: int) -> list[list[Any]]:
    return [json.loads(line) for rank in range(ranks) for line in Path(f"{said}.{rank}").read_text().splitlines()]


@pytest.mark.slow
def test_dp_4_then_2_then_8_see_what_one_rank_sees(tmp_path: Path) -> None:
    phases = (PhaseConfig(until=2 * 128, mix={"words": 0.5, "other": 0.5}), PhaseConfig(mix={"words": 0.2, "other": 0.8}))
    config = two_sources(tmp_path, *phases)
    opened = run_distributed(reading, 1, replace(config, name="whole"), str(tmp_path / "whole"))[0]
    whole = {number: (step, t) for step, number, t in lines(tmp_path / "whole", 1)}
    assert sorted(whole) == list(range(48))
    corpora = [str(Path(source.path)) for source in config.data.train.values()]
    assert not [path for path in opened if path.startswith(tuple(corpora)) or path.endswith((".idx", ".npy", ".bin"))], "no index is built"
    seen: dict[int, tuple[int, float]] = {}
    for ranks, micro, kill_at in ((4, 2, 2), (2, 4, 4), (8, 1, None)):
        now = replace(config, batch=replace(config.batch, micro_sequences=micro))
        said = tmp_path / f"dp{ranks}"
        if kill_at is None:
            run_distributed(reading, ranks, now, str(said))
        else:
            run_until_killed(reading, ranks, now, str(said), kill_at=kill_at)
        for step, number, t in lines(said, ranks):
            assert number not in seen, "a sample is trained on once"
            seen[number] = (step, t)
    assert seen == whole


def refused(config: RunConfig) -> str:
    try:
        train(config)
    except UserError as error:
        return str(error)
    return ""


def read_from(config: RunConfig) -> list[tuple[int, str, int, int]]:
    """Train; the address of every sample of the steps that were done."""
    from pretrain.engine.zero import Engine
    from pretrain.trainer import Trainer

    stepped, numbers, trainers = Engine.train_step, [], []
    built = Trainer._training_loader

    def watching(engine: Any, shard: Any, lr: float) -> Any:
        numbers.extend(number for batch in shard.micro_batches for number in batch.sample_ids)
        return stepped(engine, shard, lr)

    def kept(trainer: Any) -> Any:
        trainers.append(trainer)
        return built(trainer)

    Engine.train_step, Trainer._training_loader = watching, kept  # type: ignore[method-assign]
    train(config)
    addresses = [(number, trainers[0].samples.mixture.address(number)) for number in numbers]
    return [(number, address.source, address.epoch, address.window) for number, address in addresses]


def test_a_schedule_changes_from_here_on_and_the_change_is_recorded(tmp_path: Path) -> None:
    """Three steps of words alone; then the future changes twice, and each source goes on where it was. The past cannot change."""
    def of(*phases: PhaseConfig, **changes: Any) -> RunConfig:
        return replace(two_sources(tmp_path, *phases), duration=DurationConfig(steps=6, stop_after=changes.pop("stop", None)), **changes)

    words, both = PhaseConfig(until=3 * 128, mix={"words": 1.0}), PhaseConfig(mix={"words": 0.5, "other": 0.5})
    found = run_distributed(read_from, 1, of(PhaseConfig(mix={"words": 1.0}), stop=3))[0]
    sentence = run_distributed(refused, 1, of(words, both))[0]
    assert "data.phases: [{until: null, mix: {words: 1}}] -> [{until: 384, mix: {words: 1}}, {until: null" in sentence
    assert "resume=changed" in sentence
    past = run_distributed(refused, 1, of(PhaseConfig(until=128, mix={"other": 1.0}), both, resume="changed"))[0]
    assert "data.phases now reads other 100% in tokens 0 to 128, which this run has read as words 100%" in past
    found += run_distributed(read_from, 1, of(words, both, resume="changed", stop=5))[0]
    third = PhaseConfig(until=5 * 128, mix=both.mix)
    found += run_distributed(read_from, 1, of(words, third, PhaseConfig(mix={"words": 1.0}), resume="changed"))[0]
    assert [number for number, *_ in found] == list(range(48))
    assert len({address[1:] for address in found}) == 48, "no window comes twice"
    assert {source for number, source, *_ in found if number < 24 or number >= 40} == {"words"}
    assert {source for number, source, *_ in found if 24 <= number < 40} == {"words", "other"}
    log = list(read_log(tmp_path / "runs" / "small" / "log.jsonl"))
    events = [record for record in log if record.get("event") == "data"]
    assert ["from 384 tokens on words 50%, other 50%" in str(event) for event in events] == [True, False]
    assert "from 640 tokens on words 100%" in str(events[1])
    phases = [(record["step"], record["message"]) for record in log if record.get("event") == "phase"]
    assert phases == [
        (4, "phase 2 of 2 begins at 384 tokens, to the end: words 50%, other 50%"), (6, "phase 3 of 3 begins at 640 tokens, to the end: words 100%")
    ]  # fmt: skip
