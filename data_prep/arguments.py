"""The words of prepare_data's command line, before Hydra reads them."""

from collections.abc import Collection, Iterator
from typing import Any

from pretrain.errors import UserError, nearest

_MAPPINGS = ("keep", "drop", "sources")
_PATHS = ("input", "corpus", "against")
"""Keys that take a path or a list of them."""


def prepared(arguments: list[str], tasks: Collection[str]) -> list[str]:
    """The words that Hydra is to read instead: the task, which may be the first word alone or task=NAME, as Hydra's group; --dry-run as a key;
    and keys that users choose added. UserError for an unknown task, or two."""
    arguments = ["dry_run=true" if word == "--dry-run" else word for word in arguments]
    words = [f"task={arguments[0]}", *arguments[1:]] if arguments and not arguments[0].startswith("-") and "=" not in arguments[0] else arguments
    chosen = [word.partition("=")[2] for word in words if word.lstrip("+").startswith("task=")]
    if len(chosen) > 1:
        raise UserError(f"{' and '.join(chosen)} are two tasks; give one")
    for name in chosen:
        if name not in tasks:
            near = nearest(name, list(tasks))
            known = near if "did you mean" in near else f"; known: {', '.join(sorted(tasks))}"
            raise UserError(f"there is no task {name}{known}")
    if chosen == ["audit"] and any(word.startswith(("step=", "run=")) for word in words):
        chosen = ["audit_step"]  # of what a run read, not of a folder
    words = [f"prepare_data={chosen[0]}" if word.lstrip("+").startswith("task=") else word for word in words]
    return [new for word in words for new in _reworded(word)]


def _reworded(word: str) -> list[str]:
    """`=` says what a mapping is (Hydra would merge, and refuse new keys), and `sources.NAME.KEY=` adds a source."""
    key, equals, value = word.partition("=")
    if equals and key in _MAPPINGS:
        return [f"~{key}", f"+{key}={value}"]
    return [f"++{word}"] if equals and key.startswith("sources.") else [word]


def require_values(task: str, tree: Any) -> None:
    """UserError that names every key of a composed tree which a value must be given for."""
    if missing := list(_unset(tree, "")):
        raise UserError(f"{task} needs {' and '.join(f'{key}=…' for key in missing)}; --help shows every key")


def _unset(tree: dict[str, Any], prefix: str) -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _unset(value, f"{prefix}{key}.")
        elif value == "???":
            yield f"{prefix}{key}"


def require_path_texts(tree: dict[str, Any]) -> None:
    """UserError for a path that YAML reads as something else, such as a number."""
    for key in _PATHS:
        value = tree.get(key) or ""
        if not all(isinstance(path, str) for path in (value if isinstance(value, list) else [value])):
            raise UserError(f"{key}={value} must be a path, or a list of them: {key}=A or {key}=[A,B]; quote a number: {key}=\"'5'\"")
