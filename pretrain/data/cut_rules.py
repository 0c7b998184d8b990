"""Where text may be cut so that the ids of the parts, one after the other, are those of the whole. One rule per family of tokenizers.

Byte-pair merging is local: a merge across a place needs a piece that contains the two characters around it. Where no piece of the vocabulary
does, both sides are merged as if the other were not there (sentencepiece BPE; Hugging Face BPE without a pre-tokenizer).

Tokenizers that split text before they merge never merge across a split. Between a letter and a single space before another letter, every
pattern that is known here splits: no alternative holds a letter followed by a space, and none looks behind. Right after a single line break
that follows a visible character and stands before a letter they split too.

Unigram models of sentencepiece add up scores of the whole text in 32 bits, so the ids of long text depend on rounding: nothing is proven.
"""

import re
import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from pretrain.data.tokenizer_files import fields, messages

SPACE = "\u2581"
"""How sentencepiece writes a space."""
_CL100K = r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
PATTERNS: dict[str, str] = {
    "gpt2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "cl100k": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)" + _CL100K,
    "llama3": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)" + _CL100K,
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)" + _CL100K.replace("{1,3}", ""),
    "o200k": rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
"""Name -> the regular expression that splits text, as its publisher states it (possessive forms mean the same)."""
_SPLITS_ALONE = (r"\p{N}", r"\p{N}{1,3}", r"\p{Nd}", r"\p{Nd}{1,3}", r"\d", r"\d{1,3}")
"""Patterns that take numbers out: they neither see letters and spaces nor move a split between them."""


@dataclass(frozen=True)
class CutRule:
    """Places where text may be cut.

    accepts      whether text may be cut before position c, 0 < c < len(text).
    pattern      finds candidates; None: every position is one.
    drops_space  the space at the cut belongs to neither part: the tokenizer puts one before every text by itself.
    """

    accepts: Callable[[str, int], bool]
    pattern: re.Pattern[str] | None
    drops_space: bool = False

    def last(self, text: str, low: int, high: int) -> int | None:
        """The last place in (low, high]."""
        stop, width = high, 1 << 10
        while stop > low:
            start = max(low, stop - width)
            for place in reversed(self._candidates(text, start, stop)):
                if self.accepts(text, place):
                    return place
            stop, width = start, 2 * width
        return None

    def first(self, text: str, low: int) -> int | None:
        """The first place after `low`."""
        start, width = low, 1 << 10
        while start < len(text):
            stop = min(len(text), start + width)
            for place in self._candidates(text, start, stop):
                if self.accepts(text, place):
                    return place
            start, width = stop, min(2 * width, 1 << 20)
        return None

    def _candidates(self, text: str, low: int, high: int) -> list[int] | range:
        """In (low, high], and inside the text."""
        high = min(high, len(text) - 1)
        if self.pattern is None:
            return range(low + 1, high + 1)
        return self._matches(text, low, high)

    def _matches(self, text: str, low: int, high: int) -> list[int]:
        assert self.pattern is not None
        found = []
        for match in self.pattern.finditer(text, low + 1):
            if match.start() > high:
                break
            found.append(match.start())
        return found


_LETTERS = re.compile(r"(?<=[A-Za-z])(?= [A-Za-z])")
_LETTERS_OR_LINES = re.compile(r"(?<=[A-Za-z])(?= [A-Za-z])|(?<=\S\n)(?=[^\W\d_])")
_VISIBLE = re.compile(r"(?<=[!-~])(?= [!-~])")
_AT_SPACE = re.compile(r"(?= )")


def is_known_pattern(pattern: str) -> bool:
    """Whether the proof in this module's docstring covers it."""
    return _plain(pattern) in _KNOWN


def _plain(pattern: str) -> str:
    """Possessive quantifiers as greedy ones: what they give back never lets these patterns match elsewhere."""
    return re.sub(r"(\\p\{\w+\}|\\[a-z]|\])([?+*]|\{\d+(?:,\d+)?\})\+", r"\1\2", pattern)


_KNOWN = frozenset(PATTERNS.values())


def letters_rule(*, newlines: bool) -> CutRule:
    """For tokenizers that split between a letter and a space before a letter, and (with `newlines`) between a line break and a letter."""

    def accepts(text: str, place: int) -> bool:
        return text[place - 1] != "\n" or unicodedata.category(text[place])[0] == "L"

    return CutRule(accepts, _LETTERS_OR_LINES if newlines else _LETTERS)


def sentencepiece_rule(content: bytes, pieces: list[str], model: Any) -> CutRule | None:
    """For a sentencepiece model: its file, its pieces, and the processor."""
    parts = dict(messages(content))
    trainer, normalizer = dict(fields(parts[2])), dict(fields(parts[3]))
    is_bpe, suffix = trainer.get(3, 1) == 2, bool(trainer.get(24, 0))
    prefix, strips, escapes = (bool(normalizer.get(number, 1)) for number in (3, 4, 5))
    identity, name = not normalizer.get(2), normalizer.get(1, b"")
    if not is_bpe or suffix or not escapes or (strips and not prefix):
        return None
    known = {piece for token, piece in enumerate(pieces) if not (model.is_unknown(token) or model.is_control(token) or model.is_unused(token))}
    joined = _joined(pieces)
    # unknown characters side by side become one <unk>: one side of the cut must be known
    bytes_too = any(model.is_byte(token) for token in range(len(pieces)))
    if identity and not prefix and not strips:

        def between(text: str, place: int) -> bool:
            first, second = (SPACE if character == " " else character for character in (text[place - 1], text[place]))
            return (first, second) not in joined and (bytes_too or second in known)

        return CutRule(between, None)
    if SPACE not in known or not (identity or name in (b"nfkc", b"nmt_nfkc", b"nfkc_cf", b"nmt_nfkc_cf")):
        return None

    def at_space(text: str, place: int) -> bool:
        before = text[place - 1]
        if before in (" ", SPACE) or place + 1 >= len(text):
            return False
        return not {(before, SPACE), (before.lower(), SPACE)} & joined

    pattern = _AT_SPACE if identity and not strips else _VISIBLE if identity else _LETTERS
    return CutRule(at_space, pattern, drops_space=prefix)


def _joined(pieces: Iterable[str]) -> set[tuple[str, str]]:
    """Pairs of characters that stand side by side in a piece."""
    return {pair for piece in pieces for pair in zip(piece.replace(" ", SPACE), piece.replace(" ", SPACE)[1:], strict=False)}


def hugging_face_rule(config: dict[str, Any]) -> CutRule | None:
    """For the content of a tokenizer.json."""
    model, normalizer, splitter = config["model"], config["normalizer"], config["pre_tokenizer"]
    added = [token for token in config["added_tokens"] if not token["special"]]
    if model.get("dropout") or any(token["lstrip"] or token["rstrip"] or re.search(r"\s", token["content"]) for token in added):
        return None
    steps = _steps(splitter, "pretokenizers")
    plain = all(step["type"] in ("NFC", "NFD", "NFKC", "NFKD", "Lowercase") for step in _steps(normalizer, "normalizers"))
    if plain and any(map(_splits, steps)) and all(_splits(step) or _harmless(step) for step in steps):
        return letters_rule(newlines=all(step["type"] in ("ByteLevel", "Split", "Digits") for step in steps))
    merges_across = model["type"] != "BPE" or any(model.get(key) for key in ("ignore_merges", "continuing_subword_prefix", "end_of_word_suffix"))
    touching = any(re.match("[A-Za-z]", token["content"]) or re.search("[A-Za-z]$", token["content"]) for token in added)
    if merges_across or touching or SPACE not in model["vocab"]:
        return None
    joined = _joined(model["vocab"])

    def accepts(text: str, place: int) -> bool:
        return (text[place - 1], SPACE) not in joined

    if plain and [step["type"] for step in steps] == ["Metaspace"] and steps[0]["replacement"] == SPACE:
        return CutRule(accepts, _LETTERS)
    if not steps and _prepends(_steps(normalizer, "normalizers")):
        return CutRule(accepts, _LETTERS, drops_space=True)
    return None


def _steps(part: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    if part is None:
        return []
    return [inner for step in part[key] for inner in _steps(step, key)] if part["type"] == "Sequence" else [part]


def _splits(step: dict[str, Any]) -> bool:
    """Whether a pre-tokenizer always splits between a letter and a space before a letter."""
    kind = step["type"]
    if kind == "ByteLevel":
        return bool(step.get("use_regex", True))
    if kind == "Metaspace":
        return bool(step.get("split", True)) and step["replacement"] == SPACE
    if kind == "Split":
        return not step["invert"] and step["behavior"] == "Isolated" and is_known_pattern(step["pattern"].get("Regex", ""))
    return kind in ("Whitespace", "WhitespaceSplit", "BertPreTokenizer")


def _harmless(step: dict[str, Any]) -> bool:
    """Whether a pre-tokenizer splits, at most, at places of its own."""
    if step["type"] == "Split":
        return not step["invert"] and step["behavior"] == "Isolated" and step["pattern"].get("Regex", "") in _SPLITS_ALONE
    return step["type"] in ("Digits", "Punctuation") or (step["type"] == "ByteLevel" and not step.get("use_regex", True))


def _prepends(steps: list[dict[str, Any]]) -> bool:
    """Llama 2's normalisers: a space before the text, then spaces as sentencepiece writes them."""
    return [step["type"] for step in steps] == ["Prepend", "Replace"] and (steps[0]["prepend"], steps[1]["pattern"], steps[1]["content"]) == (
        SPACE, {"String": " "}, SPACE,
    )  # fmt: skip
