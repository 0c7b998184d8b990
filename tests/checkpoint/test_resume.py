"""What a continued run keeps: the class of every setting, the resume card, and the frozen record of a run."""

import dataclasses
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from pretrain.checkpoint.changes import FREEDOM, Freedom, changes, pattern, read_config
from pretrain.checkpoint.resume import RATES_AHEAD, ResumeCard, freeze_run
from pretrain.compose import known_keys
from pretrain.data.config import SourceConfig
from pretrain.errors import UserError
from pretrain.run_config import RunConfig
from tests.checkpoint.examples import LAYOUT, state
from tests.test_rules import BASE, changed

FOLDER = Path("runs/x/checkpoints/step_00000012")


def card(**values: Any) -> ResumeCard:
    same = {"checkpoint": FOLDER, "then": state(12), "changes": [], "layout_now": LAYOUT, "lr_now": 1e-3, "next_batch_now": "00ff"}
    return ResumeCard(**(same | {"rates_now": {}, "rows_now": 32} | values))


def between(then: RunConfig, now: RunConfig, meant_then: Any = None, meant_now: Any = None) -> list[str]:
    """What changed from one run, as its checkpoint keeps it, to another."""
    written = yaml.safe_load(yaml.safe_dump(dataclasses.asdict(then)))
    return [str(change) for change in changes(written, dataclasses.asdict(now), meant_then or {}, meant_now or {})]


# ---- settings -----------------------------------------------------------------------------------------------------------------------


def test_every_setting_has_a_class() -> None:
    keys = set(known_keys(RunConfig)) - {"data.train", "data.validation"}
    sections = {key for key in keys if any(other.startswith(f"{key}.") for other in keys)}
    sources = {f"{part}.*.{item.name}" for part in ("data.train", "data.validation") for item in dataclasses.fields(SourceConfig)}
    assert set(FREEDOM) == (keys - sections) | sources


def test_the_classes_that_were_agreed() -> None:
    of = {freedom: {key for key in FREEDOM if FREEDOM[key] is freedom} for freedom in Freedom}
    assert {"objective.name", "tokenizer", "backbone.hidden", "batch.length", "batch.global_sequences"} <= of[Freedom.FIXED]
    assert {"seed", "data.train.*.weight", "schedule.peak", "precision.compute"} <= of[Freedom.COURSE]
    assert {key for key in FREEDOM if key.startswith("optimizer.")} <= of[Freedom.COURSE]
    assert {"name", "duration.steps", "parallel.tensor", "telemetry.wandb", "checkpoint.keep"} <= of[Freedom.FREE]


def test_changes_are_named_with_both_values() -> None:
    assert between(BASE, BASE) == []
    now = changed(BASE, optimizer__beta2=0.99, optimizer__eps=1e-6, seed=3, backbone__recompute="full", schedule__warmup_steps=7, precision__fp8=True)
    assert between(BASE, now) == [
        "seed: 1 -> 3", "backbone.recompute: none -> full", "optimizer.beta2: 0.95 -> 0.99", "optimizer.eps: 1e-08 -> 1e-06",
        "schedule.warmup_steps: null -> 7", "precision.fp8: false -> true",
    ]  # fmt: skip


def test_sources_come_and_go() -> None:
    web = {"web": SourceConfig(path="web"), "my.books": SourceConfig(path="books", weight=2)}
    assert between(BASE, changed(BASE, data__train=web)) == [
        "data.train.my.books.path: absent -> books", "data.train.my.books.weight: absent -> 2"
    ]  # fmt: skip
    assert between(changed(BASE, data__train=web), BASE)[-1] == "data.train.my.books.weight: 2 -> absent"
    assert pattern("data.train.my.books.weight") == "data.train.*.weight"


def test_what_a_value_stood_for_is_compared() -> None:
    auto = changed(BASE, precision__compute="auto")
    moved = replace(auto, tokenizer="elsewhere.model")
    assert between(auto, auto, {"precision.compute": "float32"}, {"precision.compute": "bfloat16"}) == ["precision.compute: float32 -> bfloat16"]
    assert between(auto, moved, {"tokenizer": "aa"}, {"tokenizer": "aa"}) == []
    assert between(auto, auto, {"tokenizer": "aa"}, {"tokenizer": "bb"}) == ["tokenizer: aa -> bb"]


def test_a_key_that_the_older_program_lacked_had_its_default() -> None:
    written = dataclasses.asdict(BASE)
    del written["optimizer"]["clip"], written["precision"]
    assert changes(written, dataclasses.asdict(BASE), {}, {}) == []
    now = changed(BASE, optimizer__clip=0.5, precision__fp8=True)
    found = [str(change) for change in changes(written, dataclasses.asdict(now), {}, {})]
    assert found == ["optimizer.clip: 1 -> 0.5", "precision.fp8: false -> true"]


@pytest.mark.parametrize("text", [None, "- a list", "a: [", b"\xff\x00"])
def test_an_unreadable_configuration_is_one_sentence(tmp_path: Path, text: str | bytes | None) -> None:
    if text is not None:
        (tmp_path / "config.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match="config.yaml(, the configuration of the run, cannot be read| does not hold)") as caught:
        read_config(tmp_path)
    assert "\n" not in str(caught.value)


# ---- the card -----------------------------------------------------------------------------------------------------------------------


def test_card_of_an_unchanged_run() -> None:
    card().require_legal("auto")
    text = card().render()
    assert card().differences == [] and card().same_files and "warning" not in text
    for part in ("step_00000012", "12", "768", "0.001", "sample 48", "00ff", "TP1 PP1 DP1 ZeRO-1", "optimizer      found"):
        assert part in text


def of_changes(**values: Any) -> ResumeCard:
    return card(changes=changes(dataclasses.asdict(BASE), dataclasses.asdict(changed(BASE, **values)), {}, {}))


AHEAD = replace(state(12), extras={RATES_AHEAD: {"12": 1e-3, "40": 5e-4}})


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (card(lr_now=2e-3), "the schedule now gives learning rate 0.002 for step 12, which was done with 0.001"),
        (
            card(then=AHEAD, rates_now={"12": 1e-3, "40": 6e-4}),
            "the schedule now gives learning rate 0.0006 for step 41, which was to be done with 0.0005",
        ),
        (card(next_batch_now="1234"), "the data now gives another text: the next batch is not the one that was to follow"),
        (of_changes(optimizer__beta1=0.8), "optimizer.beta1: 0.9 -> 0.8"),
        (of_changes(precision__compute="fp32"), "precision.compute: auto -> fp32"),
        (replace(of_changes(duration__steps=60), lr_now=2e-3), "duration.steps: 1000 -> 60 now gives learning rate 0.002 for step 12"),
        (replace(of_changes(schedule__peak=1e-2), lr_now=2e-3), "schedule.peak: 0.0002 -> 0.01"),
        (replace(of_changes(seed=2), next_batch_now="1234"), "seed: 1 -> 2"),
    ],
)
def test_another_course_is_refused_unless_it_is_meant(found: ResumeCard, words: str) -> None:
    for resume in ("auto", "fresh"):
        with pytest.raises(UserError) as caught:
            found.require_legal(resume)
        assert words in str(caught.value) and "resume=changed" in str(caught.value) and "\n" not in str(caught.value)
    found.require_legal("changed")
    assert f"warning: {words}" in found.render() and len(found.differences) == 1


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (of_changes(backbone__hidden=64, batch__length=8), "backbone.hidden: 2176 -> 64; batch.length: 2048 -> 8"),
        (of_changes(objective__name="ar"), "objective.name: mdlm -> ar"),
        (card(rows_now=48), "rows of the vocabulary: 32 -> 48"),
    ],
)
def test_another_run_is_always_refused(found: ResumeCard, words: str) -> None:
    with pytest.raises(UserError) as caught:
        found.require_legal("changed")
    assert f"({words})" in str(caught.value) and "name=" in str(caught.value)


def test_free_settings_are_shown_and_nothing_more() -> None:
    found = of_changes(telemetry__log_every=3, duration__steps=60, parallel__tensor=2, backbone__recompute="full", duration__stop_after=5)
    found.require_legal("auto")
    assert "changed        telemetry.log_every: 10 -> 3" in found.render() and "stop_after" not in found.render()


def test_deepspeed_files_are_read_only_where_they_fit() -> None:
    assert of_changes(schedule__peak=1e-2).same_files
    assert not of_changes(optimizer__weight_decay=0.2).same_files, "DeepSpeed would put back the decay of the checkpoint"
    assert not of_changes(precision__compute="bf16").same_files
    assert not card(layout_now=replace(LAYOUT, data=2)).same_files


def test_card_shows_both_layouts_and_missing_moments() -> None:
    other = replace(LAYOUT, tensor=2, pipeline=2, virtual_pipeline=2)
    assert "TP1 PP1 DP1 ZeRO-1 -> TP2 PP2x2 DP1 ZeRO-1" in card(layout_now=other).render()
    assert "moments were not found" in card(optimizer_found=False).render()


# ---- the record ---------------------------------------------------------------------------------------------------------------------


def test_freezing_keeps_every_earlier_record(tmp_path):
    run = tmp_path / "run"
    freeze_run(run, "lr: 1\n")
    freeze_run(run, "lr: 1\n")
    assert sorted(p.name for p in run.iterdir()) == ["config.yaml", "versions.json"]
    freeze_run(run, "lr: 2\n")
    freeze_run(run, "lr: 3\n")
    assert [(run / name).read_text() for name in ("config.yaml", "config.1.yaml", "config.2.yaml")] == ["lr: 3\n", "lr: 1\n", "lr: 2\n"]
    assert json.loads((run / "versions.json").read_text())["torch"] == torch.__version__


def test_freezing_into_a_file_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        freeze_run(tmp_path / "file" / "run", "")
