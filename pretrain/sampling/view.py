"""A sequence while it is made: known text, a block for each token that is still open, digits where a token is partly known."""

from collections.abc import Callable, Collection
from itertools import groupby

from rich.panel import Panel
from rich.text import Text

from pretrain.hf_model.sampling_network import BLANK, Snapshot

Decode = Callable[[list[list[int]]], list[str]]

OPEN = "░"
HIDDEN_DIGIT = "?"


class Viewer:
    """Pictures of the first sequence of each snapshot.

    decode  ids to texts.
    end     the id between documents.
    size    ids of the tokenizer; others, such as a mask that a process treats as any id, are shown as open.
    skip    tokens at the start that were not asked for.
    """

    def __init__(self, decode: Decode, *, end: int, size: int, skip: int = 0) -> None:
        self._decode, self._end, self._size, self._skip = decode, end, size, skip

    def text(self, snapshot: Snapshot) -> str:
        """One line."""
        ids = snapshot.ids_BL[0, self._skip :].tolist()
        digits = [None] * len(ids) if snapshot.digits_BLJ is None else snapshot.digits_BLJ[0, self._skip :].tolist()
        parts: list[str] = []
        for known, run in groupby(zip(ids, digits, strict=True), key=lambda pair: 0 <= pair[0] < self._size):
            pairs = list(run)
            parts.append(self._words([token for token, _ in pairs]) if known else "".join(_open(own) for _, own in pairs))
        return " ".join(part for part in parts if part)

    def panel(self, snapshot: Snapshot, step: int) -> Panel:
        """For a terminal: what is known in bold."""
        picture = Text(overflow="fold")
        for word in self.text(snapshot).split(" "):
            picture.append(word + " ", style="dim" if OPEN in word or HIDDEN_DIGIT in word else "bold")
        return Panel(picture, title=f"sequence {int(snapshot.sequences_B[0]) + 1}, step {step}", title_align="left")

    def _words(self, ids: list[int]) -> str:
        documents: list[list[int]] = [[]]
        for token in ids:
            if token == self._end:
                documents.append([])
            else:
                documents[-1].append(token)
        return printable(" ¶ ".join(text.replace("\n", "⏎") for text in self._decode(documents)))


def printable(text: str) -> str:
    """Without what a terminal would take for orders: a model that spells bytes can say anything."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "\N{REPLACEMENT CHARACTER}" for letter in text)


def _open(digits: Collection[int] | None) -> str:
    """A token that is not known: a block, or its digits where some are."""
    if digits is None or all(digit == BLANK for digit in digits):
        return OPEN
    return f"‹{' '.join(HIDDEN_DIGIT if digit == BLANK else str(digit) for digit in digits)}›".replace(" ", "" if max(digits) < 10 else ".")
