"""The sampling command, inside the process and as a subprocess."""

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import yaml

from pretrain.convert.plain_network import open_trained
from pretrain.errors import UserError
from pretrain.objectives.config import ObjectiveName
from pretrain.sampling.config import SamplingConfig
from pretrain.sampling.generate import generate, require_sampled
from pretrain.sampling.memory import bytes_per_token
from pretrain.sampling.output import text_of
from pretrain.sampling.session import choose_device, run_sampling
from tests.convert.trained import WORDS, write_run

ROOT = Path(__file__).resolve().parents[2]
LAUNCHER = ROOT / "launchers" / "sample.py"


def sample(run: Path, **fields: Any) -> list[dict[str, Any]]:
    config = SamplingConfig(checkpoint=str(run), **fields)
    trained = open_trained(run, config.step)
    output = Path(config.output or run / "samples.jsonl")
    run_sampling(
        trained.network(device=torch.device("cpu"), dtype=torch.float32), trained.tokenizer, config, vocabulary=trained.vocabulary,
        trained_length=trained.run.batch.length, step=trained.step, output=output,
        host_memory=lambda: 2.0**27,
    )  # fmt: skip
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
        ({"sampler": "ar"}, "sampler=ar cannot sample a masked diffusion model; use ancestral or first_hitting"),
        ({"prompt": "the queen and the king", "length": 5}, "5 tokens and leaves nothing to draw in length=5"),
        ({"count": 0}, r"count=0 must lie in \[1, 1000000\]"),
        ({"count": 10**12}, "count=1000000000000 must lie in"),
        ({"batch": 10**12}, "batch=1000000000000 must lie in"),
        ({"length": 5 * 10**9}, "length=5000000000 must lie in"),
        ({"length": 1 << 20, "count": 1}, r"length=1048576 at once need at least [0-9.]+ GiB, and 0.1 GiB are free; use length=[0-9]+ with batch=1"),
        ({"length": 1 << 16, "count": 9}, "9 sequences of length=65536 at once need at least .*; use batch=[3-8], or less"),
        ({"steps": 10**12}, "steps=1000000000000 must lie in"),
        ({"top_k": 10**12}, "top_k=1000000000000 must lie in"),
        ({"temperature": math.nan}, r"temperature=nan must be 0 \(the most likely token\) or lie in \[1e-06, 1e\+06\]; use for example 1"),
        ({"temperature": math.inf}, "temperature=inf must be 0"),
        ({"temperature": -1.0}, "temperature=-1.0 must be 0 .*; use for example 0"),
        ({"temperature": 1e-320}, "temperature=1e-320 must be 0"),
        ({"seed": -1}, "seed=-1 must lie in"),
        ({"seed": 2**64}, "seed=18446744073709551616 must lie in"),
        ({"output": " "}, "output is empty"),
        ({"device": ""}, "device is empty"),
        ({"top_p": 0.0}, "top_p=0.0 is no share"),
        ({"sampler": "first_hitting", "steps": 4}, "steps=4 means nothing to sampler=first_hitting"),
    ],
)
def test_mistakes_are_sentences(tmp_path: Path, fields: dict[str, Any], sentence: str) -> None:
    run, _ = write_run(tmp_path, "mdlm")
    with pytest.raises(UserError, match=sentence):
        sample(run, **fields)


@pytest.mark.parametrize("objective", get_args(ObjectiveName))
def test_models_of_other_laws_are_refused(objective: str) -> None:
    if objective in ("ar", "mdlm"):
        require_sampled(objective)
    else:
        with pytest.raises(UserError, match=f"trained with objective={objective}, and this command samples ar and mdlm"):
            require_sampled(objective)


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


def test_the_memory_estimate_of_diffusion_is_below_one_evaluation(tmp_path: Path) -> None:
    """Against all that torch's profiler sees allocated by a sampler of one step."""
    from torch.profiler import ProfilerActivity, profile

    run, _ = write_run(tmp_path, "mdlm")
    trained = open_trained(run)
    network = trained.network(device=torch.device("cpu"), dtype=torch.float32)
    config = SamplingConfig(checkpoint=str(run), count=2, steps=1)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        list(generate(network, config, vocabulary=trained.vocabulary, prompt=[], length=32))
    allocated = sum(max(event.self_cpu_memory_usage, 0) for event in profiler.key_averages())
    assert 0 < 2 * 32 * bytes_per_token(network, autoregressive=False) < allocated


def test_the_memory_estimate_of_ar_is_its_cache_and_noise(tmp_path: Path) -> None:
    run, _ = write_run(tmp_path, "ar", kind="llama")
    network = open_trained(run).network(device=torch.device("cpu"), dtype=torch.bfloat16)
    cache = network.new_cache(2, 32)
    held = sum(tensor.nbytes for tensor in vars(cache).values() if isinstance(tensor, torch.Tensor) and tensor.is_floating_point())
    assert 2 * 32 * bytes_per_token(network, autoregressive=True) == held + 2 * 32 * 80


def test_yaml_has_every_key_with_its_default() -> None:
    tree = yaml.safe_load((ROOT / "configs" / "sample.yaml").read_text())
    fields = {item.name: item.default for item in dataclasses.fields(SamplingConfig) if item.name != "checkpoint"}
    assert {key: value for key, value in tree.items() if key not in ("defaults", "hydra", "checkpoint")} == fields


def test_launcher_from_another_directory(tmp_path: Path) -> None:
    run, _ = write_run(tmp_path, "mdlm")
    command = [sys.executable, str(LAUNCHER), f"checkpoint={run}", "count=2", "steps=4", "temperature=0.5", "output=out/texts.jsonl"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "" and done.stdout.count("--- sample") == 2
    records = [json.loads(line) for line in (tmp_path / "out" / "texts.jsonl").read_text().splitlines()]
    assert len(records) == 2 and all(record["nfe"] <= 4 for record in records)
    wrong = subprocess.run([sys.executable, str(LAUNCHER), f"checkpoint={run}", "count=0"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert wrong.returncode == 64 and wrong.stderr.count("\n") == 1 and "count=0 must lie in" in wrong.stderr
