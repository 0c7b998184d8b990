"""Reads prepared corpora whole and compares every byte with what the manifest remembers, shard by shard."""

import time
from pathlib import Path

from data_prep.config import AuditConfig
from data_prep.progress import say
from pretrain.data.manifest import FILE_NAME, Manifest, audit
from pretrain.errors import UserError, counted


def audit_corpora(config: AuditConfig) -> None:
    """One line per shard. UserError, after the last shard, naming all that changed or are missing."""
    given = [Path(folder) for folder in ([config.corpus] if isinstance(config.corpus, str) else config.corpus)]
    folders = [folder for each in given for folder in _corpora(each)]
    manifests = [Manifest.load(folder) for folder in folders]  # before hours go into the first
    damaged = [shard for folder, manifest in zip(folders, manifests, strict=True) for shard in _audit(folder, manifest)]
    if damaged:
        raise UserError(
            f"{counted(len(damaged), 'shard')} changed or went missing after preparation: {', '.join(damaged)}; copy them again from where they are "
            "whole, or remove their folder and prepare the corpus again"
        )


def _corpora(folder: Path) -> list[Path]:
    """The folder, or those of its sources where several were prepared into it."""
    inner = [] if (folder / FILE_NAME).exists() or not folder.is_dir() else sorted(path.parent for path in folder.glob(f"*/{FILE_NAME}"))
    return inner or [folder]


def _audit(folder: Path, manifest: Manifest) -> list[str]:
    """The shards of a corpus that are not as they were prepared."""
    total = sum(shard.bin_bytes + shard.idx_bytes for shard in manifest.shards)
    read, damaged, start = 0, [], time.monotonic()
    for number, (shard, problem) in enumerate(audit(folder, manifest), start=1):
        read += shard.bin_bytes + shard.idx_bytes
        speed = read / max(time.monotonic() - start, 1e-9)
        left = f"{read / total:.0%}, {speed / 1e6:,.0f} MB/s, {(total - read) / speed:,.0f} s left"
        say(f"[{number}/{len(manifest.shards)}] {folder / shard.file}: {problem or 'whole'} ({left})")
        if problem:
            damaged.append(str(folder / shard.file))
    if not damaged:
        size = f"{counted(manifest.tokens, 'token')} in {counted(manifest.documents, 'document')}, {total / 1e9:,.2f} GB"
        say(f"{folder} is as it was prepared: {size}")
    return damaged
