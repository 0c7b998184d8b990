"""What a sampling command understands: words, settings and prompts."""

import dataclasses
import json
import math
import re
import sys
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import yaml

from pretrain.compose import compose_arguments, resolved, typed
from pretrain.errors import UserError
from pretrain.hf_model.sampling_network import BLANK
from pretrain.hf_model.sampling_settings import SAMPLERS, SETTINGS
from pretrain.objectives.config import ObjectiveName
from pretrain.sampling.config import SamplingConfig, quoted
from pretrain.sampling.generate import choose_method
from pretrain.sampling.prompts import canvases, read_prompts

ROOT = Path(__file__).resolve().parents[2]
TREE = yaml.safe_load((ROOT / "configs" / "sample.yaml").read_text())
B = BLANK


def config(**fields: Any) -> SamplingConfig:
    return SamplingConfig(checkpoint="runs/x", **fields)


class Letters:
    """A codec of single characters."""

    def encode(self, texts: list[str]) -> list[list[int]]:
        return [[ord(letter) for letter in text] for text in texts]

    def decode(self, ids: list[list[int]]) -> list[str]:
        return ["".join(map(chr, row)) for row in ids]


def test_yaml_has_every_key_with_its_default() -> None:
    fields = {item.name: item.default for item in dataclasses.fields(SamplingConfig) if item.name != "checkpoint"}
    assert {key: value for key, value in TREE.items() if key not in ("defaults", "hydra", "checkpoint")} == fields


def test_every_setting_has_a_key_of_its_kind_and_belongs_to_a_sampler() -> None:
    hints = get_type_hints(SamplingConfig)
    assert set(SAMPLERS) == set(ObjectiveName.__args__)
    assert set(SETTINGS) == {name for samplers in SAMPLERS.values() for taken in samplers.values() for name in taken}
    for name, setting in SETTINGS.items():
        kind = str if setting.choices else bool if name in ("loop", "self_conditioning") else int if setting.low == 1 else float
        assert hints[name] == kind | None, name
        assert (setting.default is None) == bool(setting.absent)


def test_help_names_every_sampler_and_setting() -> None:
    text = TREE["hydra"]["help"]["template"]
    table = text.partition("takes:\n")[2].partition("\n\n  steps")[0]
    blocks = dict(re.findall(r"^  (\w+) {2,}((?:.*\n?)(?: {6,}.*\n?)*)", table, re.MULTILINE))
    assert set(blocks) == set(SAMPLERS)
    for objective, samplers in SAMPLERS.items():
        for sampler, taken in samplers.items():
            own = f"{sampler} ({', '.join(taken)})" if taken and objective != "replaid" else sampler
            assert own in blocks[objective], (objective, own)
    assert all(re.search(rf"\b{name}\b", text.partition("\n\n  steps")[2]) for name in SETTINGS if name != "steps")


@pytest.mark.parametrize(
    "prompt",
    [
        "What's in a name, Romeo?", "the [MASK]*5 king", "a\\'b", "x ${oc.env:HOME} y", "back\\", "back\\\\", 'say "hi"', "{a: b}", "", "1e3", "null",
        "x \\${y}", "don\\\\'t\\", "a=b", "'", "ends with '", "\\'${x}'\\\\${y}",
    ],
)  # fmt: skip
def test_texts_arrive_as_they_stand(monkeypatch: pytest.MonkeyPatch, prompt: str) -> None:
    monkeypatch.setattr(sys, "argv", ["sample.py", *quoted(["checkpoint=x", "sampler=dpm++", f"prompt={prompt}", "blank=[M]"])])
    composed = compose_arguments("sample")
    assert composed is not None
    found = typed(SamplingConfig, resolved(composed))
    assert (found.prompt, found.sampler, found.blank) == (prompt, "dpm++", "[M]")


def test_quotes_of_somebody_who_knows_hydra() -> None:
    assert quoted(["prompt='a, b'", 'prompt="a, b"', "count=3"]) == ["prompt='a, b'", 'prompt="a, b"', "count=3"]


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"count": 0}, r"count=0 must lie in \[1, 1000000\]"),
        ({"count": 10**12}, "count=1000000000000 must lie in"),
        ({"batch": 10**12}, "batch=1000000000000 must lie in"),
        ({"length": 5 * 10**9}, "length=5000000000 must lie in"),
        ({"top_k": 10**12}, "top_k=1000000000000 must lie in"),
        ({"temperature": math.nan}, r"temperature=nan must be 0 \(the most likely token\) or lie in \[1e-06, 1e\+06\]; use for example 1"),
        ({"temperature": math.inf}, "temperature=inf must be 0"),
        ({"temperature": -1.0}, "temperature=-1.0 must be 0 .*; use for example 0"),
        ({"temperature": 1e-320}, "temperature=1e-320 must be 0"),
        ({"seed": -1}, "seed=-1 must lie in"),
        ({"seed": 2**64}, "seed=18446744073709551616 must lie in"),
        ({"output": " "}, "output is empty"),
        ({"device": ""}, "device is empty"),
        ({"blank": ""}, "blank is empty; use for example"),
        ({"top_p": 0.0}, "top_p=0.0 is no share"),
        ({"temperature": 0.0, "top_p": 0.9}, "top_p=0.9 means nothing at temperature=0"),
        ({"temperature": 0.0, "top_k": 5}, "top_k=5 means nothing at temperature=0"),
        ({"sampler": "ddmp"}, "there is no sampler=ddmp; did you mean ddpm"),
        ({"prompt": "a", "prompts": "file"}, "prompt and prompts=file both say how to begin"),
    ],
)
def test_values_that_no_model_takes(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        config(**fields)


@pytest.mark.parametrize(
    ("objective", "fields", "sentence"),
    [
        ("mdlm", {"sampler": "ar"}, "^sampler=ar cannot sample a model trained with objective=mdlm; use ancestral, first_hitting, "),
        ("ar", {"sampler": "ancestral"}, "^sampler=ancestral cannot sample a model trained with objective=ar; use ar, or auto$"),
        ("ar", {"steps": 4}, "^steps=4 means nothing to sampler=ar of ar, which takes no settings; leave it out$"),
        ("mdlm", {"sampler": "first_hitting", "steps": 4}, "takes no settings; leave it out; of this model's samplers, ancestral or psi take it"),
        ("mdlm", {"eta": 0.1}, "^eta=0.1 means nothing to sampler=ancestral of mdlm, which takes steps, noise_removal; .*, psi takes it$"),
        ("replaid", {"noise_removal": "greedy"}, "which takes steps, score_temperature, self_conditioning; leave it out$"),
        ("esolm", {"sampler": "block", "order": "random"}, "^order=random is no choice; use natural, shuffled_steps or shuffled$"),
        ("duo", {"noise_removal": "argmax"}, "noise_removal=argmax is no choice; use ancestral or greedy"),
        ("mdlm", {"steps": 10**12}, r"steps=1000000000000 must lie in \[1, 1e\+06\]; leave it out for one per token to fill"),
        ("esolm", {"alpha_0": 1.5}, r"alpha_0=1.5 must lie in \[0, 1\]; leave it out for as in training"),
        ("mdm_prime", {"joint_above": -0.1}, "joint_above=-0.1 must lie in"),
        ("replaid", {"score_temperature": 0.0}, "score_temperature=0 must lie in"),
        ("replaid", {"score_temperature": math.nan}, "score_temperature=nan must lie in"),
        ("duo", {"sampler": "psi", "loop_alpha": 0.8}, "^loop_alpha=0.8 belongs to loop=true; add it, or leave loop_alpha out$"),
        ("duo", {"sampler": "psi", "loop": True, "psi": "constant", "eta": 1.0}, "kappa is 1, and a loop that waits without correcting does nothing"),
        ("mdlm", {"sampler": "psi", "loop": True, "steps": 2}, "needs at least 3 steps, got 2"),
        ("mdlm", {"sampler": "psi", "loop": True, "loop_rise": 0.9, "loop_fall": 0.2}, "leaves steps to wait"),
    ],
)
def test_settings_that_do_not_fit_the_sampler(objective: str, fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        choose_method(config(**fields), objective)


def test_defaults_are_filled_in() -> None:
    assert choose_method(config(), "duo").settings == {"steps": None, "noise_removal": "ancestral"}
    chosen = choose_method(config(sampler="psi", eta=0.3, loop=False), "mdlm")
    assert chosen.sampler == "psi" and chosen.settings["eta"] == 0.3 and chosen.settings["psi"] == "max_capped"
    assert [choose_method(config(), objective).sampler for objective in SAMPLERS] == ["ar", *["ancestral"] * 3, "ddpm", "ancestral"]


def canvas(prompt: str, *, continues: bool = False, trained: int = 9, **fields: Any) -> tuple[int, ...]:
    [found] = canvases([prompt], Letters(), config(**fields), trained_length=trained, continues=continues)
    return found.ids


def test_canvases() -> None:
    a, b = ord("a"), ord("b")
    assert canvas("ab") == (a, b, *[B] * 7) and canvas("ab", length=4) == (a, b, B, B) and canvas("", length=2) == (B, B)
    assert canvas("a[MASK]b") == (a, B, b)
    assert canvas("a [MASK]*3 b") == (a, B, B, B, ord(" "), b), "the space before a blank belongs to the token that fills it"
    assert canvas("[MASK]a[MASK]", length=5) == (B, a, B, B, B)
    assert canvas("a___*2b", blank="___") == (a, B, B, b)
    assert canvas("[MASK]", blank="<>") == tuple(map(ord, "[MASK]")) + (B,) * 3
    assert canvas("ab[MASK]", continues=True) == (a, b, B)


@pytest.mark.parametrize(
    ("prompt", "fields", "sentence"),
    [
        ("abcdef", {"length": 5}, "the prompt 'abcdef' has 6 tokens and leaves nothing to draw in length=5; give a greater length"),
        ("abcdefghi", {}, "leaves nothing to draw in length=9"),
        ("a[MASK]*9", {"length": 5}, "has 10 tokens with its blanks, more than length=5"),
        ("a[MASK]*0", {}, r"\[MASK\]\*0 asks for 0 blanks; ask for 1 to"),
        ("a[MASK]*999999999", {}, "asks for 999999999 blanks"),
        ("x" * 50, {}, f"the prompt '{'x' * 37}…' has 50 tokens"),
    ],
)
def test_prompts_that_cannot_be(prompt: str, fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        canvas(prompt, **fields)


def test_an_autoregressive_model_does_not_fill_gaps() -> None:
    with pytest.raises(UserError, match="'a\\[MASK\\]b' goes on after a blank; put its blanks at the end"):
        canvas("a[MASK]b", continues=True)


def test_files_of_prompts(tmp_path: Path) -> None:
    lines, objects, empty = tmp_path / "p.txt", tmp_path / "p.jsonl", tmp_path / "empty.txt"
    lines.write_text("one, two\n\n  three\n", encoding="utf-8")
    objects.write_text(json.dumps({"prompt": "a\nb"}) + "\n" + json.dumps({"prompt": "c", "other": 1}), encoding="utf-8")
    empty.write_text("\n")
    assert read_prompts(config(prompt="x")) == ["x"] and read_prompts(config()) == [""]
    assert read_prompts(config(prompts=str(lines))) == ["one, two", "  three"]
    assert read_prompts(config(prompts=str(objects))) == ["a\nb", "c"]
    with pytest.raises(UserError, match="holds no prompt"):
        read_prompts(config(prompts=str(empty)))
    with pytest.raises(UserError, match="cannot be read .*No such file"):
        read_prompts(config(prompts=str(tmp_path / "none")))
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n["b"]\n')
    with pytest.raises(UserError, match="line 2 of .* is not an object with a prompt"):
        read_prompts(config(prompts=str(objects)))
    lines.write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="it is not UTF-8 text"):
        read_prompts(config(prompts=str(lines)))
