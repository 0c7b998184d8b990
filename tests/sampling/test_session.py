"""The sampling command, inside the process and as a subprocess."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pretrain.convert.plain_network import open_trained
from pretrain.convert.sampled import open_sampled
from pretrain.errors import UserError
from pretrain.sampling import session
from pretrain.sampling.config import SamplingConfig
from pretrain.sampling.output import text_of
from pretrain.sampling.session import choose_device, run_sampling
from tests.convert.trained import WORDS, write_run

ROOT = Path(__file__).resolve().parents[2]
LAUNCHER = ROOT / "launchers" / "sample.py"


def sample_to(run: Path, output: Path, **fields: Any) -> None:
    config = SamplingConfig(checkpoint=str(run), output=str(output), **fields)
    run_sampling(open_sampled(run, config.step), config, device=torch.device("cpu"), host_memory=lambda: 2.0**27)


def sample(run: Path, **fields: Any) -> list[dict[str, Any]]:
    output = Path(fields.pop("output", run / "samples.jsonl"))
    sample_to(run, output, **fields)
    return [json.loads(line) for line in output.read_text().splitlines()]


@pytest.mark.parametrize(
    ("kind", "objective", "sampler"),
    [("dit", "mdlm", "ancestral"), ("dit", "mdlm", "first_hitting"), ("llama", "ar", "ar"), ("dit", "ar", "ar")],
)
def test_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, objective: str, sampler: str) -> None:
    run, _ = write_run(tmp_path, objective, kind=kind)
    records = sample(run, sampler="auto" if sampler == "ancestral" else sampler, count=5, prompt="the king")
    assert [record["sequence"] for record in records] == [0, 1, 2, 3, 4]
    for record in records:
        assert len(record["ids"]) == 12 and record["ids"][:2] == [WORDS.index("the"), WORDS.index("king")]
        assert all(0 <= token < len(WORDS) + 2 for token in record["ids"])
        assert record["text"].startswith("the king") and 1 <= record["nfe"] <= 10
        assert record["settings"]["sampler"] == sampler and record["settings"]["step"] == 7
    again = sample(run, sampler=sampler, count=5, prompt="the king", batch=2)
    assert [record["ids"] for record in again] == [record["ids"] for record in records]
    out = capsys.readouterr().out
    assert records[0]["text"] in out and "tokens/s" in out and "NFE" in out


def test_greedy_samples_are_all_the_same(tmp_path: Path) -> None:
    run, _ = write_run(tmp_path, "ar", kind="llama")
    assert len({record["text"] for record in sample(run, temperature=0.0)}) == 1


def test_documents_of_a_text() -> None:
    def decode(ids: list[list[int]]) -> list[str]:
        return ["".join(chr(token) for token in row) for row in ids]

    assert text_of([9, *b"ab", 9, 9, *b"c"], decode, eos_id=9) == "ab\n\nc"


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"sampler": "ar"}, "sampler=ar cannot sample a model trained with objective=mdlm; use ancestral, first_hitting"),
        ({"prompt": "the queen and the king", "length": 5}, "5 tokens and leaves nothing to draw in length=5"),
        ({"length": 1 << 20, "count": 1}, r"length=1048576 at once need at least [0-9.]+ GiB, and 0.1 GiB are free; use length=[0-9]+ with batch=1"),
        ({"length": 1 << 16, "count": 9}, "9 sequences of length=65536 at once need at least .*; use batch=[3-8], or less"),
        ({"sampler": "first_hitting", "steps": 4}, "steps=4 means nothing to sampler=first_hitting"),
    ],
)
def test_mistakes_are_sentences(tmp_path: Path, fields: dict[str, Any], sentence: str) -> None:
    run, _ = write_run(tmp_path, "mdlm")
    with pytest.raises(UserError, match=sentence):
        sample(run, **fields)
    assert not list(run.glob("samples*"))


def test_prompts_from_a_file_in_text(tmp_path: Path) -> None:
    """Beginnings of two lengths, and a gap: each prompt's samples are those that it has alone with the same numbers."""
    run, _ = write_run(tmp_path, "mdlm")
    (tmp_path / "prompts.txt").write_text("the king\nthe queen [MASK]*2 king\na play of\n")
    records = sample(run, prompts=str(tmp_path / "prompts.txt"), count=2, batch=3)
    assert sorted(record["sequence"] for record in records) == list(range(6))
    for record in records:
        assert record["text"].split()[0] == record["prompt"].split()[0]
        assert record["prompt"] == ["the king", "the queen [MASK]*2 king", "a play of"][record["sequence"] // 2]
        assert len(record["ids"]) == (5 if "MASK" in record["prompt"] else 12)
        assert "MASK" not in record["prompt"] or [record["ids"][i] for i in (0, 1, 4)] == [0, 1, 3]
    alone = sample(run, prompt="the king", count=2, batch=1)
    assert [record["ids"] for record in alone] == [record["ids"] for record in records if record["prompt"] == "the king"]
    sample_to(run, tmp_path / "texts.txt", prompts=str(tmp_path / "prompts.txt"), count=1)
    text = (tmp_path / "texts.txt").read_text()
    assert text.count("network evaluations (NFE)") == 3 and "--- sample 2 |" in text and not list(tmp_path.glob("*.part"))


def test_what_was_sampled_before_an_interruption_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = write_run(tmp_path, "mdlm")
    (run / "samples.jsonl").write_text("earlier\n")
    whole = session.generate

    def interrupted(*words: Any, **fields: Any) -> Iterator[Any]:
        for number, one in enumerate(whole(*words, **fields)):
            if number == 2:
                raise KeyboardInterrupt
            yield one

    monkeypatch.setattr(session, "generate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sample(run, count=4)
    assert (run / "samples.jsonl").read_text() == "earlier\n"
    assert [json.loads(line)["sequence"] for line in (run / "samples.jsonl.part").read_text().splitlines()] == [0, 1]


def test_unknown_devices_are_refused() -> None:
    assert choose_device("cpu") == torch.device("cpu")
    for name in ("gpu", "cuda:77", "meta", "mps", "cuda:-1"):
        with pytest.raises(UserError, match=f"^device={name} cannot be used here; use device=cpu.*, or device=auto$"):
            choose_device(name)


def test_without_cuda_a_cuda_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr(torch, "ones", refuse)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UserError, match="^device=cuda cannot be used here; use device=cpu, or device=auto$"):
        choose_device("cuda")


def test_an_output_that_cannot_be_written_is_refused_before_sampling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = write_run(tmp_path, "mdlm")
    monkeypatch.setattr("pretrain.sampling.session.generate", lambda *_, **__: pytest.fail("sampled"))
    (tmp_path / "file").write_text("")
    for output, sentence in [("file/x.jsonl", "a file is in the way"), (".", "a folder has that name"), ("a" * 300, "choose a shorter name")]:
        with pytest.raises(UserError, match=sentence):
            sample(run, output=str(tmp_path / output))


@pytest.mark.parametrize("step", [None, 3])
def test_a_name_that_no_run_can_have(step: int | None) -> None:
    with pytest.raises(UserError, match="^there is no checkpoint at aaa"):
        open_trained(Path("a" * 300), step)


def test_the_step_of_a_checkpoints_own_folder_must_be_its(tmp_path: Path) -> None:
    run, _ = write_run(tmp_path, "mdlm", steps=(7, 8))
    assert open_trained(run / "checkpoints/step_00000007", 7).step == 7
    with pytest.raises(UserError, match="step_00000007 is the checkpoint of step 7, not 8; leave step out, or name the run directory"):
        open_trained(run / "checkpoints/step_00000007", 8)


def test_launcher_from_another_directory(tmp_path: Path) -> None:
    run, _ = write_run(tmp_path, "mdlm")
    command = [sys.executable, str(LAUNCHER), f"checkpoint={run}", "count=2", "steps=4", "temperature=0.5", "output=out/texts.jsonl", "view=true"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert 1 <= len(lines) <= 4 and all(re.match(r"sequence 1, step [1-4] \| \d+/24 tokens \| ", line) for line in lines)
    assert "░" not in lines[-1] and done.stdout.count("--- sample") == 2
    records = [json.loads(line) for line in (tmp_path / "out" / "texts.jsonl").read_text().splitlines()]
    assert len(records) == 2 and all(record["nfe"] <= 4 for record in records)
    wrong = subprocess.run([sys.executable, str(LAUNCHER), f"checkpoint={run}", "count=0"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert wrong.returncode == 64 and wrong.stderr.count("\n") == 1 and "count=0 must lie in" in wrong.stderr


def test_earlier_samples_stay(tmp_path: Path) -> None:
    run, _ = write_run(tmp_path, "ar", kind="llama")
    for _ in range(3):
        config = SamplingConfig(checkpoint=str(run), count=1)
        model = open_sampled(run, None)
        run_sampling(model, config, device=torch.device("cpu"), host_memory=lambda: 2.0**27)
    assert {path.name for path in model.home.glob("samples*")} == {"samples.jsonl", "samples-2.jsonl", "samples-3.jsonl"}
