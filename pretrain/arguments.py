"""The words of a command line before Hydra reads them: what it would take in another sense than its writer, or refuse in words of its own.

Hydra merges a mapping into the one that a preset gives, so that `data.validation={}` would change nothing. Here `=` says what the sources
are, and `+data.train.NAME.path=` still adds one.
"""

from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, OverrideParseException

from pretrain.errors import UserError, nearest

SOURCES = ("data.train", "data.validation")
"""Mappings whose keys the user chooses."""
_TAKE_A_WORD = ("--cfg", "-c", "--package", "-p", "--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd", "--info", "-i")


def prepared(arguments: Sequence[str], groups: Mapping[str, Sequence[str]], sections: Collection[str]) -> list[str]:
    """The words that Hydra is to read instead.

    groups    name -> choices of every configuration group.
    sections  keys that hold keys.

    Raises UserError for a word that cannot be meant as it stands.
    """
    words: list[str] = []
    for before, word in zip(("", *arguments), arguments, strict=False):
        flag = word.startswith("-") or before in _TAKE_A_WORD
        words += [word] if flag else _reworded(word, groups, sections)
    return words


def unreadable(word: str) -> str:
    """The sentence about a word that is no setting."""
    return f"cannot read {word!r} on the command line: write key=value, and quote values that hold , : = or spaces"


def _reworded(word: str, groups: Mapping[str, Sequence[str]], sections: Collection[str]) -> list[str]:
    override = _parsed(word)
    key, text = override.key_or_group, word.partition("=")[2]
    if not key:
        raise UserError(unreadable(word))
    if override.package is not None:
        raise UserError(f"{word}: a choice goes to its own place; write {key}{f'={text}' if text else ''} without the @")
    if override.is_sweep_override():
        quoted = text.replace("'", "\\'")
        raise UserError(f"{key}={text} lists several values: give one, a list in brackets where one is taken, or quote a text: {key}=\"'{quoted}'\"")
    if override.is_delete():
        return [word]
    if key in groups and override.is_force_add():
        raise UserError(f"{word}: write {key}={text}, or +{key}={text} where no preset chooses a {key}")
    value: Any = override.value()
    if key in groups and not isinstance(value, dict) and not (isinstance(value, str) and value):
        raise UserError(f"{key}={text} must name one choice of {key}{nearest(text, list(groups[key]))}")
    if key == "data.phases" and isinstance(value, dict):
        raise UserError(f"{key}={text} must be a list of phases: {key}=[{{until: 1e9, mix: {{web: 1}}}}, {{mix: {{web: 1, code: 1}}}}]")
    if key in SOURCES:
        return _sources(override, word, value)
    if value == {} and key.startswith(SOURCES):
        raise UserError(f"{key}={text} sets nothing: to leave the source out, write ~{key}")
    if value == {} and key in sections:
        raise UserError(f"{key}={text} sets nothing: set its keys one by one, as in {key}.KEY=…")
    if key == "data" and isinstance(value, dict) and any(part in value for part in ("train", "validation")):
        raise UserError(f"{word}: sources inside data={{…}} would be mixed with the preset's; write data.train={{…}} or data.validation={{…}}")
    return [word]


def _sources(override: Override, word: str, value: Any) -> list[str]:
    key, text = override.key_or_group, word.partition("=")[2]
    if value is None:
        return [word]  # composed as null, and read as no source
    if not isinstance(value, dict):
        raise UserError(f"{key}={text} must map names to sources, as in {key}={{web: {{path: FOLDER}}}}, or be {{}} for none")
    if override.is_add() or override.is_force_add():
        return [word]
    return [f"~{key}", f"+{key}={text}"]


def _parsed(word: str) -> Override:
    try:
        return _parser().parse_override(word)
    except (OverrideParseException, HydraException):
        raise UserError(unreadable(word)) from None


@cache
def _parser() -> OverridesParser:
    return OverridesParser.create()
