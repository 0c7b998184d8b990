"""Which code a job runs: commit, changes that are not committed, and a hash of the sources themselves. No torch here."""

import hashlib
import subprocess
from dataclasses import dataclass
from pathlib import Path

PARTS = ("pretrain", "finetune", "data_prep", "launchers", "configs")
"""Folders of the repository whose files a run depends on."""
SUFFIXES = (".py", ".yaml", ".sbatch")


@dataclass(frozen=True, kw_only=True)
class CodeVersion:
    """commit is None outside git. changed are files that git calls changed or does not know; sources is a hash of every source file."""

    commit: str | None
    changed: list[str]
    sources: str


def code_version(repository: Path) -> CodeVersion:
    """The version of the code in a folder."""
    commit = _git(repository, "rev-parse", "HEAD")
    changed = _git(repository, "status", "--porcelain") if commit else None
    return CodeVersion(commit=commit, changed=[line[3:] for line in (changed or "").splitlines()], sources=sources_hash(repository))


def difference(repository: Path) -> str:
    """What `git apply` needs to make the changed files from the commit; empty outside git. Files that git does not know are not in it."""
    text = _git(repository, "diff", "HEAD", "--binary")
    return f"{text}\n" if text else ""


def sources_hash(repository: Path) -> str:
    """Hash of names and contents of every source file: the same on every node that sees the same code."""
    digest = hashlib.blake2b(digest_size=16)
    for part in PARTS:
        for path in sorted(path for path in (repository / part).rglob("*") if path.suffix in SUFFIXES and path.is_file()):
            for data in (str(path.relative_to(repository)).encode(), path.read_bytes()):
                digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()


def _git(repository: Path, *words: str) -> str | None:
    """None where there is no git, or no repository of it."""
    try:
        done = subprocess.run(["git", "-C", str(repository), *words], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.rstrip("\n") if done.returncode == 0 else None
