"""Long documents in pieces: a tokenizer's memory grows with the length of its text (a hundred bytes per character), and some stall.

Pieces end where the tokenizer's cut rule proves that the ids are those of the uncut text. Where no rule is known, or the text has no such place,
it stays whole up to UNCUT_CHARACTERS. Beyond, it is cut where the ids of the text around the cut come out equal with and without it; text without
such a place is refused.
"""

from collections.abc import Iterator

import numpy as np

from pretrain.data.tokenizer import Tokenizer

UNCUT_CHARACTERS = 1 << 24
"""Text of so many characters is tokenised whole when it must: one to two gigabytes of memory."""
_AROUND = 2048
_TRIES = 64


class TooLong(Exception):
    """A document that can be neither cut nor tokenised whole: the reason."""


def encode_long(tokenizer: Tokenizer, text: str, size: int) -> Iterator[np.ndarray]:
    """Ids of `text`, in int32 arrays of pieces of about `size` characters. TooLong where a piece would be longer than UNCUT_CHARACTERS."""
    start = 0
    while len(text) - start > size:
        place, skipped = _next_place(tokenizer, text, start, size)
        if place is None:
            break
        yield _ids(tokenizer, text[start:place])
        start = place + skipped
    yield _ids(tokenizer, text[start:])


def _ids(tokenizer: Tokenizer, text: str) -> np.ndarray:
    return np.asarray(tokenizer.encode([text])[0], dtype=np.int32)


def _next_place(tokenizer: Tokenizer, text: str, start: int, size: int) -> tuple[int | None, int]:
    """(where the piece that begins at `start` ends, characters to skip there); None: at the end of the text."""
    if rule := tokenizer.cut_rule:
        place = rule.last(text, start, start + size) or rule.first(text, start + size)
        if place is not None and place - start <= UNCUT_CHARACTERS:
            return place, int(rule.drops_space)
    if len(text) - start <= UNCUT_CHARACTERS:
        return None, 0
    middle = start + UNCUT_CHARACTERS // 2
    for number in range(_TRIES):
        space = text.rfind(" ", start + 1, middle - number * 7)
        for place in (space, middle - number):
            for skipped in (0, 1) if place == space else (0,):
                if place > start and _same(tokenizer, text, place, skipped):
                    return place, skipped
    raise TooLong(f"a document of {len(text)} characters that can neither be cut without changing its tokens nor be tokenised whole")


def _same(tokenizer: Tokenizer, text: str, place: int, skipped: int) -> bool:
    """Whether the ids around a place are the same with and without a cut."""
    before, after = text[max(place - _AROUND, 0) : place], text[place : place + _AROUND]
    whole, left, right = tokenizer.encode([before + after, before, after[skipped:]])
    return whole == left + right
