"""The resume card, fingerprints, and the frozen record of a run."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pretrain.checkpoint.resume import ResumeCard, fingerprint, freeze_run
from pretrain.errors import UserError
from tests.checkpoint.examples import LAYOUT, state


def card(**changes) -> ResumeCard:
    folder = Path("runs/x/checkpoints/step_00000012")
    values = {"checkpoint": folder, "then": state(12), "layout_now": LAYOUT, "lr_now": 1e-3, "next_batch_now": "00ff"}
    return ResumeCard(**(values | {"optimizer_found": True} | changes))


def test_card_of_an_unchanged_run():
    text = card().render()
    assert card().differences == [] and "warning" not in text
    for part in ("step_00000012", "12", "768", "0.001", "sample 48", "00ff", "TP1 PP1 DP1 ZeRO-1", "optimizer      found"):
        assert part in text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lr_now": 2e-3}, "learning rate 0.002 for the last step, which was done with 0.001"),
        ({"next_batch_now": "1234"}, "the next batch is not the one"),
        ({"optimizer_found": False}, "moments were not found"),
    ],
)
def test_card_warns_of_what_changed(changes, words):
    assert words in card(**changes).render()


def test_card_shows_both_layouts():
    other = replace(LAYOUT, tensor=2, pipeline=2, virtual_pipeline=2)
    assert "TP1 PP1 DP1 ZeRO-1 -> TP2 PP2x2 DP1 ZeRO-1" in card(layout_now=other).render()


def test_fingerprint_sees_values_shapes_types_and_order():
    a, b = torch.arange(6), torch.ones(2, 3, dtype=torch.bfloat16)
    prints = [fingerprint(x) for x in ([a, b], [b, a], [a.view(2, 3), b], [a.int(), b], [a + 1, b], [a], [a, b.float()], [a, torch.empty(0)])]
    assert len(set(prints)) == len(prints)
    assert fingerprint([a.clone(), b.clone()]) == prints[0] and len(prints[0]) == 16


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
