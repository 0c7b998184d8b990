"""tiktoken's rank files: a line per token, base64 of its bytes and its rank (OpenAI's NAME.tiktoken, Llama 3's tokenizer.model).

The file says neither how text is split before the merges nor which special tokens there are. A JSON file beside it, FILE.json, does:

    {"pattern": "llama3", "special_tokens": {"<|end_of_text|>": 128001}, "eos_token": "<|end_of_text|>"}

`pattern` is a name of PATTERNS or a regular expression, and `bos_token`, `pad_token` and `unk_token` may be named too. OpenAI's own files
are known by their name and need no JSON.
"""

import base64
import binascii
import json
import re
from pathlib import Path
from typing import Any

from pretrain.data.cut_rules import PATTERNS, CutRule, is_known_pattern, letters_rule
from pretrain.data.tokenizer_files import Unusable
from pretrain.errors import UserError, nearest

_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n?")
_OPENAI: dict[str, tuple[str, dict[str, int]]] = {
    "gpt2": ("gpt2", {"<|endoftext|>": 50256}),
    "r50k_base": ("gpt2", {"<|endoftext|>": 50256}),
    "cl100k_base": (
        "cl100k",
        {"<|endoftext|>": 100257, "<|fim_prefix|>": 100258, "<|fim_middle|>": 100259, "<|fim_suffix|>": 100260, "<|endofprompt|>": 100276},
    ),
    "o200k_base": ("o200k", {"<|endoftext|>": 199999, "<|endofprompt|>": 200018}),
}
_KEYS = ("pattern", "special_tokens", "eos_token", "bos_token", "pad_token", "unk_token")


def looks_like_ranks(content: bytes) -> bool:
    """Whether a file's first line is a token and its rank."""
    return _LINE.fullmatch(content[: content.find(b"\n") + 1 or None][:4096]) is not None


class TiktokenRanks:
    """A tokenizer from ranks. Text never becomes a special token.

    settings  what the ranks do not say and ids depend on, as bytes to hash.
    """

    def __init__(self, path: Path, content: bytes) -> None:
        from tiktoken import Encoding

        pattern, special, roles = _settings(path)
        ranks = _ranks(content)
        self._pattern = PATTERNS.get(pattern, pattern)
        self._special = {token: name for name, token in special.items()}
        if clash := next((token for token in self._special if token < len(ranks)), None):
            raise Unusable(f"special token {self._special[clash]!r} has the id {clash} of a token of text; give it one of {len(ranks)} or more")
        try:
            self._model = Encoding(path.name, pat_str=self._pattern, mergeable_ranks=ranks, special_tokens=special)
        except (ValueError, AssertionError) as error:
            raise Unusable(f"pattern or ranks do not serve: {' '.join(str(error).split())[:200]}") from error
        self._bytes = {rank: token for token, rank in ranks.items()}
        self.size: int = max(len(ranks) - 1, *self._special, 0) + 1
        self.special_ids = {role: special[name] for role, name in roles.items()}
        self.eos_id = self.special_ids.get("eos")
        self.settings = json.dumps([self._pattern, sorted(special.items()), sorted(roles.items())]).encode()

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text."""
        return [self._model.encode_ordinary(text) for text in texts]

    def decode(self, ids: list[list[int]]) -> list[str]:
        """Text of each list; special tokens vanish."""
        return [self._model.decode([token for token in row if token in self._bytes]) for row in ids]

    def piece(self, token: int) -> str:
        """The token's text, or its name."""
        return self._special.get(token) or self._bytes.get(token, b"").decode("utf-8", "replace")

    def emits(self, token: int) -> bool:
        """Whether it is a token of text."""
        return token in self._bytes

    def cut_rule(self) -> CutRule | None:
        """Proven for the patterns that are known."""
        return letters_rule(newlines=True) if is_known_pattern(self._pattern) else None


def _ranks(content: bytes) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), start=1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise Unusable(f"line {number} is not a base64 token and its rank") from error
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise Unusable(f"its {len(ranks)} ranks are not 0 to {len(ranks) - 1}, each once: it is cut off, or lines are doubled")
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise Unusable(f"it has no token for the byte 0x{missing[0]:02x}: it is cut off")
    return ranks


def _settings(path: Path) -> tuple[str, dict[str, int], dict[str, str]]:
    """Pattern, special tokens, and role -> token of the JSON beside a rank file, or what is known of its name."""
    beside = path.with_name(path.name + ".json")
    example = '{"pattern": "llama3", "special_tokens": {"<|end_of_text|>": 128001}, "eos_token": "<|end_of_text|>"}'
    if not beside.exists():
        if path.stem in _OPENAI:
            return *_OPENAI[path.stem], {"eos": "<|endoftext|>"}
        raise UserError(f"{path} holds ranks only; write {beside.name} next to it, such as {example}")
    try:
        config: Any = json.loads(beside.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{beside} cannot be read ({error}); it must be like {example}") from error
    special: Any = config.get("special_tokens") if isinstance(config, dict) else None
    if not isinstance(special, dict) or not isinstance(config.get("pattern"), str):
        raise UserError(f"{beside} must hold a pattern and special_tokens, like {example}")
    if unknown := [key for key in config if key not in _KEYS]:
        raise UserError(f"{beside} has the unknown key {unknown[0]}{nearest(unknown[0], list(_KEYS))}")
    if not all(isinstance(token, int) and not isinstance(token, bool) and 0 <= token < 2**31 for token in special.values()):
        raise UserError(f"{beside} must give every special token an id from 0 to 2^31 - 1, like {example}")
    roles = {key.removesuffix("_token"): config[key] for key in _KEYS[2:] if key in config}
    for role, name in roles.items():
        if name not in special:
            raise UserError(f"{beside} says {role}_token={name!r}, which is not one of its special_tokens{nearest(str(name), list(special))}")
    return config["pattern"], special, roles
