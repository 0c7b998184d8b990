"""Secrets out of what is written and shown: logs, frozen configurations, checkpoints, wandb, messages.

Two things give a secret away: a name (WANDB_API_KEY, hf_token, password) or the form of a value (user:password@host in a URL, token=… in its
query). What environment variables of such names hold is removed wherever it appears. Names are compared word by word, so that `tokenizer`,
`milestone_tokens` and `nats_per_token` are none, and numbers are never secrets.
"""

import os
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

HIDDEN = "***"
_WORDS = {"token", "key", "apikey", "password", "passwd", "passphrase", "pwd", "secret", "credential", "credentials", "auth"}
_ENDINGS = ("password", "passwd", "secret", "apikey")
"""PGPASSWORD is one word."""
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_SHORTEST = 8
"""Characters. The values of shorter variables (KEY=1) are words that appear everywhere."""
_USER_INFO = re.compile(r"\b([A-Za-z][A-Za-z0-9+.-]+:/{1,2})[^/\s@'\"]+@")  # one slash is left of two in a path
_QUERY = re.compile(r"([?&;]([\w.-]+)=)([^&;\s'\"]+)")


def is_secret(name: str) -> bool:
    """Whether a key or a variable is called as secrets are."""
    words = [word.lower() for word in _WORD.findall(name)]
    return any(word in _WORDS or word.endswith(_ENDINGS) for word in words)


def redact(text: str) -> str:
    """A text without credentials in URLs and without what the environment keeps secret."""
    for value in _hidden(tuple(os.environ.items())):
        text = text.replace(value, HIDDEN)
    text = _USER_INFO.sub(rf"\1{HIDDEN}@", text)
    return _QUERY.sub(lambda match: match[1] + HIDDEN if is_secret(match[2]) else match[0], text)


def redacted(value: Any, name: str = "") -> Any:
    """A tree of mappings, sequences and values without secrets; `name` is what the value is called."""
    if isinstance(value, Mapping):
        return {key: redacted(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(item, name) for item in value]
    if isinstance(value, str):
        return HIDDEN if value and is_secret(name) else redact(value)
    return value


@lru_cache(1)
def _hidden(environment: tuple[tuple[str, str], ...]) -> list[str]:
    """Values to hide, the longest first: one may hold another."""
    values = {value for name, value in environment if len(value) >= _SHORTEST and is_secret(name) and not os.path.exists(value)}
    return sorted(values, key=len, reverse=True)
