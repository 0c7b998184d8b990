"""What a fine-tuning command says, as a run: the preset's network, objective and tokenizer without its pretraining text. No torch here."""

from collections.abc import Mapping
from typing import Any

from pretrain.data.sft_format import TEMPLATES, with_line_breaks
from pretrain.errors import UserError

_TEXT = ("data.train", "data.validation", "data.phases")
_OBJECTIVE = {"replaid": ("prompt_embedding", True), "duo": ("curriculum", "none")}
"""What fine-tuning sets where the command line does not: prompts have a table of their own, and a curriculum is over."""
FORMAT_TEXTS = tuple(f"sft.format.{name}" for name in TEMPLATES)
"""Keys whose values a command line takes as they stand, but for \\n, which is a line break, as in evaluate.py's format.question."""
_LENGTHS = ("duration.steps", "duration.tokens", "duration.flops")


def fine_tuning_tree(tree: Mapping[str, Any], words: list[str]) -> dict[str, Any]:
    """The tree of a run that reads problems. words: the command line.

    UserError for words that have no effect here.
    """
    refuse_words(words)
    found = {key: dict(value) if isinstance(value, dict) else value for key, value in tree.items()}
    if isinstance(found.get("data"), dict):
        found["data"] |= {"train": {}, "validation": {}, "phases": []}
    if found.get("init_from") == "":  # null: from scratch
        raise UserError("no value for init_from: name the run that pretrained the model, as runs/NAME, or a folder that transformers loads")
    _set_objective(found, words)
    _set_line_breaks(found)
    if isinstance(found.get("duration"), dict):  # one step, until the examples are counted (problems.open_problems)
        found["duration"] |= {"steps": 1, "tokens": None, "flops": None}
    return found


def refuse_words(words: list[str]) -> None:
    """UserError for text to pretrain on, another length, and what launchers/pretrain.py does besides."""
    for word in words:
        key = word.lstrip("+~").partition("=")[0]
        if key.startswith(_TEXT):
            raise UserError(f"{word}: fine-tuning reads problems, not text; set sft.train=FILE and sft.validation=FILE")
        if key in _LENGTHS and not word.endswith("=null"):
            raise UserError(f"{word} would contradict sft.epochs, from which the length follows; set sft.epochs=…")
        if word.startswith(("selftest", "verify")) and "=" in word and not word.endswith(("=false", "=null")):
            raise UserError(f"{word} belongs to launchers/pretrain.py; leave it out")


def _set_line_breaks(tree: dict[str, Any]) -> None:
    sft = tree.get("sft")
    if not isinstance(sft, dict) or not isinstance(sft.get("format"), dict):
        return
    tree["sft"] = sft | {"format": with_line_breaks(sft["format"])}


def _set_objective(tree: dict[str, Any], words: list[str]) -> None:
    objective = tree.get("objective")
    if not isinstance(objective, dict) or objective.get("name") not in _OBJECTIVE:
        return
    name, (key, value) = objective["name"], _OBJECTIVE[objective["name"]]
    if not any(word.lstrip("+").startswith(f"objective.{name}.{key}=") for word in words) and isinstance(objective.get(name), dict):
        tree["objective"] = objective | {name: objective[name] | {key: value}}
