"""How often a run reads its sources: the table before training, and the refusal."""

import dataclasses
import re
from dataclasses import replace
from pathlib import Path

import pytest

from pretrain.checkpoint.history import PHASES
from pretrain.checkpoint.layout import COMPLETE, CONFIG, TRAIN_STATE
from pretrain.data.config import DataConfig, PhaseConfig, SourceConfig
from pretrain.data.manifest import Manifest
from pretrain.data.phases import planned_phases, to_record
from pretrain.errors import UserError
from pretrain.launch_config import PlanConfig
from pretrain.plan.epochs import check_repetition, readings
from pretrain.plan.plan import make_plan
from pretrain.plan.table import show
from pretrain.rules import resolve
from pretrain.run_config import DurationConfig, RunConfig
from tests.checkpoint.examples import state
from tests.small_run import small_config

STEP = 8 * 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("epochs")
    small_config(path)
    return path


def phased(folder: Path, *phases: tuple[float | None, dict[str, float]], steps: int = 100, **data: object) -> RunConfig:
    sources = {name: SourceConfig(path=str(folder / part / "corpus")) for name, part in (("web", "train"), ("code", "held_out"))}
    listed = [PhaseConfig(until=until, mix=mix) for until, mix in phases]
    config = DataConfig(train=sources, phases=listed, **data)  # type: ignore[arg-type]
    return small_config(folder, data=config, duration=DurationConfig(steps=steps))


def table(config: RunConfig) -> list:
    return readings(config, resolve(config, world_size=1, model_size=400))


def test_passes_are_counted_by_phase_and_in_all(folder: Path) -> None:
    config = phased(folder, (25 * STEP, {"web": 3, "code": 1}), (None, {"code": 1}))
    web, code = (Manifest.load(folder / part / "corpus").tokens for part in ("train", "held_out"))
    first, second, third = table(config)
    assert [(one.phase, one.source, one.tokens) for one in (first, second, third)] == [
        (1, "web", 150 * 16), (1, "code", 50 * 16), (2, "code", 600 * 16)
    ]  # fmt: skip
    assert first.passes == first.total == 2400 / web and first.share == 0.75 and first.end == third.start == 25 * STEP
    assert third.passes == 9600 / code and third.total == pytest.approx((800 + 9600) / code)


def test_too_many_passes_are_refused_and_every_fix_works(folder: Path) -> None:
    phases = [(25 * STEP, {"web": 0.5, "code": 0.5}), (None, {"web": 0.4, "code": 0.6})]
    config = phased(folder, *phases)
    with pytest.raises(UserError) as caught:
        check_repetition(config, table(config))
    sentence = str(caught.value)
    found = re.fullmatch(
        r"data source 'code' would be read [\d.]+ times by the end of phase 2 \(1.28e\+04 tokens\): it holds [\d,]+ tokens, and data.max_epochs=4; "
        r"add text to it, lower its share of phase 2 from 0.6 to (0\.\d+), or set data.max_epochs=([\d.]+) \(null: no limit\)",
        sentence,
    )
    assert found, sentence
    share, limit = float(found[1]), float(found[2])
    lower = phased(folder, phases[0], (None, {"web": 1 - share, "code": share}), max_epochs=4.0)
    # The run leaves within a block, whose 1024 samples are shuffled: a few of them more or less.
    assert all(one.total <= 4.3 for one in table(lower) if one.source == "code")
    check_repetition(phased(folder, *phases, max_epochs=limit), table(config))
    check_repetition(phased(folder, *phases, max_epochs=None), table(config))


def test_what_is_not_prepared_is_shown_and_not_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = phased(folder, (25 * STEP, {"web": 3, "code": 1}), (None, {"code": 1}))
    gone = replace(config, data=replace(config.data, train={name: SourceConfig(path="nowhere") for name in ("web", "code")}))
    check_repetition(gone, table(gone))
    show(make_plan(gone, PlanConfig(vocabulary=400)))
    assert capsys.readouterr().out.count("not prepared") == 3


def test_a_run_that_goes_on_counts_what_it_has_read(folder: Path) -> None:
    """Ten steps of web alone are recorded; the configuration now says code alone, from there on."""
    before = replace(phased(folder), data=replace(phased(folder).data, train={"web": phased(folder).data.train["web"]}), name="going")
    checkpoint = before.directory / "checkpoints" / "step_00000010"
    checkpoint.mkdir(parents=True)
    record = to_record(planned_phases(before.data, global_sequences=8, length=16))
    done = replace(state(10), step=10, samples=80, tokens=1280, extras={PHASES: record})
    for name, text in ((TRAIN_STATE, done.to_json()), (CONFIG, str(dataclasses.asdict(before))), (COMPLETE, "")):
        (checkpoint / name).write_text(text)
    now = replace(phased(folder), data=replace(before.data, train={"code": phased(folder).data.train["code"]}), name="going", resume="changed")
    assert [(one.source, one.tokens) for one in table(now)] == [("web", 1280), ("code", 90 * STEP)]
    assert [one.source for one in table(replace(now, resume="fresh"))] == ["code"]
