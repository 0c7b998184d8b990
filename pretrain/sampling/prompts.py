"""From prompts to canvases: token ids with blanks where a sampler fills something in.

A prompt without blanks is a beginning, and the rest of the sequence is blank. In one with blanks each stands for one token (`[MASK]*5` for
five), and the sequence ends where the prompt does, unless a length says that it goes on. The texts between blanks are encoded apart. A
space before a blank is dropped, since tokens carry their leading space with them.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pretrain.errors import UserError
from pretrain.hf_model.sampling_network import BLANK
from pretrain.sampling.config import SamplingConfig
from pretrain.sampling.model import Codec

MOST_BLANKS = 2**20


@dataclass(frozen=True)
class Canvas:
    """A sequence to fill: the prompt's number, the prompt, and the ids with BLANK where a token is to be drawn."""

    number: int
    prompt: str
    ids: tuple[int, ...]

    @property
    def blanks(self) -> int:
        """Tokens to draw."""
        return self.ids.count(BLANK)


def read_prompts(config: SamplingConfig) -> list[str]:
    """The prompts of a command. Raises UserError for a file that cannot be read or holds none."""
    if config.prompts is None:
        return [config.prompt]
    path = Path(config.prompts)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"prompts={path} cannot be read ({getattr(error, 'strerror', None) or 'it is not UTF-8 text'}); name another file") from error
    found = [_prompt_of(line, number, path) for number, line in enumerate(lines, start=1) if line.strip()]
    if not found:
        raise UserError(f"prompts={path} holds no prompt; write one per line")
    return found


def _prompt_of(line: str, number: int, path: Path) -> str:
    if path.suffix != ".jsonl":
        return line
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    if not isinstance(record, dict) or not isinstance(record.get("prompt"), str):
        raise UserError(f'line {number} of {path} is not an object with a prompt; write {{"prompt": "…"}} in each line')
    return record["prompt"]


def canvases(prompts: list[str], codec: Codec, config: SamplingConfig, *, trained_length: int, continues: bool) -> list[Canvas]:
    """One for each prompt.

    continues  whether the model can only continue a text (AR), so that blanks come last.

    Raises UserError for a prompt that leaves nothing to draw or does not fit the length, and for blanks that the model cannot fill.
    """
    return [_canvas(number, prompt, codec, config, trained_length, continues) for number, prompt in enumerate(prompts)]


def _canvas(number: int, prompt: str, codec: Codec, config: SamplingConfig, trained_length: int, continues: bool) -> Canvas:
    ids = list(_ids(prompt, codec, config.blank))
    filled_in = BLANK in ids
    length = config.length or (len(ids) if filled_in else trained_length)
    known = len(ids) - ids.count(BLANK)
    if len(ids) > length > known:
        said = f"the prompt {_short(prompt)} has {len(ids)} tokens with its blanks, more than length={length}"
        raise UserError(f"{said}; leave out length, or give a greater one")
    if len(ids) > length or known == length:
        raise UserError(f"the prompt {_short(prompt)} has {known} tokens and leaves nothing to draw in length={length}; give a greater length")
    ids += [BLANK] * (length - len(ids))
    if continues and BLANK in ids[:known]:
        raise UserError(f"an autoregressive model continues a text, and the prompt {_short(prompt)} goes on after a blank; put its blanks at the end")
    return Canvas(number, prompt, tuple(ids))


def _ids(prompt: str, codec: Codec, blank: str) -> Iterator[int]:
    """Ids of the prompt, BLANK for its blanks."""
    position = 0
    for match in re.finditer(re.escape(blank) + r"(?:\*(\d{1,9}))?", prompt):
        yield from _encoded(prompt[position : match.start()].rstrip(" "), codec)
        count = int(match.group(1) or 1)
        if not 1 <= count <= MOST_BLANKS:
            raise UserError(f"{match.group()} asks for {count} blanks; ask for 1 to {MOST_BLANKS}")
        yield from [BLANK] * count
        position = match.end()
    yield from _encoded(prompt[position:], codec)


def _encoded(text: str, codec: Codec) -> list[int]:
    return codec.encode([text])[0] if text else []


def _short(prompt: str) -> str:
    return repr(prompt if len(prompt) <= 40 else prompt[:37] + "…")
