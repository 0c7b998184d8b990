"""The one exception that means "the user can fix this": launchers print its sentence and exit, without a traceback. And words for it."""

import difflib
from collections.abc import Sequence
from typing import Any


class UserError(Exception):
    """A mistake in a config, file, checkpoint or data line.

    The message is one sentence for a person: the value found, the rule it breaks, and the nearest fix.
    """


def spelled(value: Any) -> str:
    """A value as one writes it on the command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {spelled(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(spelled, value)) + "]"
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)


def counted(number: float, one: str, many: str = "") -> str:
    """`1 file`, `1,200 files`. many: the plural, where it is not `one` with an s."""
    digits = f"{number:,.0f}"
    return f"{digits} {one if digits == '1' else many or one + 's'}"


def are(number: int) -> str:
    """`is` after "1 of 3 files", `are` after "2 of 3 files"."""
    return "is" if number == 1 else "are"


def nearest(name: str, options: Sequence[str]) -> str:
    """`; did you mean …?`, or the options themselves where none is near and they are few."""
    near = [option for option in difflib.get_close_matches(name, options, n=3, cutoff=0.6) if option != name]
    if not near:
        last = name.rpartition(".")[2]
        similar = difflib.get_close_matches(last, [option.rpartition(".")[2] for option in options], n=3, cutoff=0.7)
        near = [option for option in options if option.rpartition(".")[2] in similar and option != name][:3]
    if near:
        return f"; did you mean {' or '.join(near)}?"
    return f"; known: {', '.join(sorted(options))}" if len(options) <= 12 else "; --help lists the groups, --cfg job every key"
