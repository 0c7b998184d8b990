"""Saving, finding, verifying and pruning the checkpoints of one run.

A save goes: the writer makes step_N.partial -> every rank writes its files there -> every file is synced and hashed, spread over the ranks ->
manifest.json -> COMPLETE -> rename to step_N. Later, when the run has proved healthy, older ones beyond `keep` are renamed, then deleted. Whatever
a crash interrupts, a folder called step_N is either complete or detectably damaged, and the newest complete one is found by looking, never
through a pointer file.

All ranks must see one file system under the run directory (a local disk on one node, a shared one on several). Only rank 0 lists, creates,
renames and deletes; what it sees is what all ranks act on.
"""

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from pretrain.checkpoint import files, layout
from pretrain.checkpoint.files import Damage, FileRecord, complaint, inspect, remedy, sync_folder, write_durably
from pretrain.checkpoint.layout import CHECKPOINTS, CONFIG, DAMAGED, PARTIAL, TrainState, step_name, step_of
from pretrain.checkpoint.lock import restarted
from pretrain.checkpoint.peers import DiskError, Peers
from pretrain.errors import UserError
from pretrain.redaction import redact
from pretrain.telemetry.log import LOG_NAME, read_log

T = TypeVar("T")

STARTERS = (
    r"config(\.\d+)?\.yaml(\.partial)?", r"versions(\.\d+)?\.json(\.partial)?", r"\.hydra", r"slurm", r"REQUEUE(\.partial)?", r"PREEMPT",
    r"log\.jsonl\.old-\d+",
)  # fmt: skip
"""Patterns of what may lie in a run directory before its first step; anything else is work that must not be lost."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint whose checksums match."""

    folder: Path
    state: TrainState

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.state.step


class CheckpointManager:
    """The checkpoints of one run. Every rank makes one and calls every method.

    keep   complete checkpoints retained, at least the newest; 0: all.
    peers  the ranks; `Peers.alone()` for one process.
    say    receives sentences for the user, on the writer only.
    """

    def __init__(self, run_dir: Path, keep: int, peers: Peers | None = None, say: Callable[[str], None] = print) -> None:
        self.run_dir, self.folder, self.keep = run_dir, run_dir / CHECKPOINTS, keep
        self._peers = peers or Peers.alone()
        self._say = (lambda text: say(redact(text))) if self._peers.is_writer else lambda _: None

    def over(self, peers: Peers) -> "CheckpointManager":
        """The same checkpoints for ranks that reach each other another way."""
        return CheckpointManager(self.run_dir, self.keep, peers, self._say)

    # ---- starting -----------------------------------------------------------------------------------------------------------------

    def begin(self, resume: Literal["auto", "changed", "fresh"]) -> Checkpoint | None:
        """The checkpoint to continue from, or None to start in a directory that holds no work. Call it before anything is written there.

        fresh moves what is there aside (NAME.old-1, …) and deletes nothing. A job that Slurm or torchrun restarts keeps its command line:
        its fresh means the first start only. Such a job also starts over, with its log renamed, where it died before its first checkpoint.

        Raises UserError if the directory holds work but no checkpoint, or only damaged ones.
        """
        if resume == "fresh" and not restarted():
            moved = self._attempt(self._move_aside, "move the old run aside")
            if moved:
                self._say(f"{self.run_dir} was moved to {moved}")
            return None
        checkpoint = self.latest()
        if checkpoint is None:
            work = self._attempt(lambda: _work(self.run_dir), "read the run directory")
            if work and restarted() and self._attempt(lambda: _never_saved(self.run_dir, work), "read the run directory"):
                aside = self._attempt(lambda: _set_log_aside(self.run_dir), "set the log aside")
                self._say(f"the run died before its first checkpoint and starts over; its log was renamed to {aside.name}")
            elif work:
                found = ", ".join(work[:3]) + (", …" if len(work) > 3 else "")
                raise UserError(
                    f"{self.run_dir} is not empty ({found}) but holds no complete checkpoint to continue; "
                    "choose another name=, or resume=fresh to move it aside and start over"
                )
        return checkpoint

    def latest(self) -> Checkpoint | None:
        """The newest complete checkpoint, every checksum verified (spread over the ranks); None if there is none and nothing is damaged.

        Damaged ones that are newer are named and set aside under another name; left-overs of interrupted saves and deletions are removed.

        Raises UserError, naming each, if there are checkpoints and all are damaged.
        """
        names: list[str] = self._attempt(self._tidy, "look for checkpoints")
        damaged: dict[str, str] = {}
        for name in reversed(names):
            damages = self._verify(self.folder / name)
            if damages:
                damaged[name] = complaint(self.folder / name, damages)
                continue
            for each, what in damaged.items():
                aside = self._attempt(lambda each=each: _set_aside(self.folder / each), "set a damaged checkpoint aside")  # type: ignore[misc]
                self._say(f"{what}; it was renamed to {aside.name}")
            if damaged:
                self._say(f"using the newest complete checkpoint, {name}, instead")
            return Checkpoint(self.folder / name, TrainState.read(self.folder / name))
        if damaged:
            raise UserError(f"no checkpoint can be used: {'; '.join(damaged.values())}; restore one, or start over with resume=fresh")
        return None

    # ---- saving -------------------------------------------------------------------------------------------------------------------

    def save(self, step: int, write: Callable[[Path], None], state: TrainState, config: str) -> Path:
        """Save all ranks' state as the checkpoint of `step`; its folder. Returns at once if a complete one of that step is there.

        write   writes this rank's files below the given folder. After a failed write it must enter no collective before it raises
                (engine.zero_files sees to that for DeepSpeed).
        config  text of the run's configuration, for config.yaml.

        Raises UserError on every rank if the disk refused on any (full, read-only, broken); earlier checkpoints are intact then.
        """
        target = self.folder / step_name(step)
        partial = target.with_name(target.name + PARTIAL)
        try:
            if self._peers.writer(lambda: self._prepare(target, partial)):
                return target
            self._peers.everyone(lambda: write(partial))
            names = self._peers.writer(lambda: _write_state(partial, state, config))
            records = self._peers.everyone(lambda: self._measure(partial, names))
            self._peers.writer(lambda: _seal(partial, target, step, [record for share in records for record in share]))
        except DiskError as error:
            self._peers.writer(lambda: shutil.rmtree(partial, ignore_errors=True))  # before any rank leaves
            raise UserError(
                f"checkpoint {target.name} could not be saved: {error}; earlier checkpoints are intact: {remedy(str(error), self.folder)}, or move "
                "the run directory to another disk (root=), then start again"
            ) from None
        return target

    def _prepare(self, target: Path, partial: Path) -> bool:
        """Make the folder to write in; True if there is nothing to do."""
        if target.exists():
            if not inspect(target, contents=False):
                return True
            _set_aside(target)
        _remove(partial)
        partial.mkdir(parents=True)
        return False

    def _measure(self, partial: Path, names: list[str]) -> list[FileRecord]:
        """Sync and hash this rank's share of the files, and its own that a slow shared file system does not show the writer yet."""
        share = names[self._peers.rank :: self._peers.size] + sorted(set(files.content(partial)) - set(names))
        for name in share:
            files.sync_file(partial / name)
        return [FileRecord.of(partial, name) for name in share]

    def size_of(self, folder: Path) -> int:
        """Bytes of a complete checkpoint's files, by its manifest; 0 on all ranks but the writer."""
        return sum(record.bytes for record in files.read_manifest(folder)[0]) if self._peers.is_writer else 0

    def prune(self) -> None:
        """Delete complete checkpoints beyond `keep` that are no milestones. A failure is reported and stops nothing: the newer ones are safe.

        Call it once the newest has proved good: it deletes what a run could fall back on.
        """
        if self.keep == 0 or not self._peers.is_writer:
            return
        try:
            complete = [name for name in _steps(self.folder) if not inspect(self.folder / name, contents=False)]
            for name in complete[: -self.keep]:
                if not _is_milestone(self.folder / name):
                    self._delete(name)
        except OSError as error:
            self._say(f"an old checkpoint could not be deleted ({error.strerror}: {error.filename}); it will be tried again")

    def _delete(self, name: str) -> None:
        """A crash in between leaves a name that is never read, and removed at the next start."""
        doomed = self.folder / (name + layout.DELETING)
        os.rename(self.folder / name, doomed)
        sync_folder(self.folder)
        shutil.rmtree(doomed)

    # ---- helpers ------------------------------------------------------------------------------------------------------------------

    def _attempt(self, action: Callable[[], T], what: str) -> T:
        """Run `action` on the writer, with a sentence for the user if the disk refuses."""
        try:
            return self._peers.writer(action)
        except DiskError as error:
            raise UserError(f"could not {what} in {self.run_dir}: {error}; {remedy(str(error), self.run_dir)}") from None

    def _tidy(self) -> list[str]:
        """Remove left-overs; names of what claims to be a checkpoint, oldest first."""
        if self.folder.is_dir():
            for entry in self.folder.iterdir():
                if entry.name.endswith((PARTIAL, layout.DELETING)):
                    _remove(entry)
        return _steps(self.folder)

    def _verify(self, folder: Path) -> list[Damage]:
        """Like files.inspect, with the reading spread over the ranks."""

        def first_look() -> tuple[list[FileRecord], list[Damage]]:
            records, damages = files.read_manifest(folder)
            return records, damages or files.check_sizes(folder, records) + files.check_names(folder, records)

        records, damages = self._attempt(first_look, "read a checkpoint")
        if damages:
            return damages
        shares = self._peers.exchange(files.check_content(folder, records[self._peers.rank :: self._peers.size]))
        return [damage for share in shares for damage in share]

    def _move_aside(self) -> Path | None:
        if not _work(self.run_dir):
            return None
        aside = _free_name(self.run_dir, ".old")
        os.rename(self.run_dir, aside)
        sync_folder(aside.parent)
        return aside


def find_checkpoint(path: Path) -> Checkpoint:
    """A checkpoint to read from: `path` itself, or the newest complete one of the run directory `path`. Checksums are verified; changes nothing.

    Raises UserError if there is none, or the one named is damaged.
    """
    path = path.parent if path.name == CHECKPOINTS else path
    if step_of(path.name) is None and os.path.isdir(path / CHECKPOINTS):  # not Path.is_dir, which raises for names that are too long
        complaints = []
        for name in reversed(_steps(path / CHECKPOINTS)):
            folder = path / CHECKPOINTS / name
            damages = inspect(folder)
            if not damages:
                return Checkpoint(folder, TrainState.read(folder))
            complaints.append(complaint(folder, damages))
        found = f" ({'; '.join(complaints)})" if complaints else ""
        raise UserError(f"{path} holds no complete checkpoint{found}; train it until its next save, or name another run")
    advice = "name a run directory, or a folder such as runs/NAME/checkpoints/step_00001000"
    if not os.path.isdir(path):
        raise UserError(f"there is no checkpoint at {path}; {advice}")
    damages = inspect(path)
    if damages:
        advice = f"use another of this run's checkpoints, or {advice}" if step_of(path.name) is not None else advice
        raise UserError(f"{complaint(path, damages)}; {advice}")
    return Checkpoint(path, TrainState.read(path))


def _steps(folder: Path) -> list[str]:
    if not folder.is_dir():
        return []
    return sorted((entry.name for entry in folder.iterdir() if step_of(entry.name) is not None), key=lambda name: step_of(name) or 0)


def _is_milestone(folder: Path) -> bool:
    """Whether a checkpoint is to be kept for good; one that does not say is kept, too."""
    try:
        return TrainState.read(folder).milestone
    except UserError:
        return True


def _seal(partial: Path, target: Path, step: int, records: list[FileRecord]) -> None:
    """Manifest, marker, rename: each on the disk before the next."""
    for folder in [path for path in partial.rglob("*") if path.is_dir()]:
        sync_folder(folder)
    text = files.manifest_text(step, records)
    write_durably(partial / layout.MANIFEST, text)
    sync_folder(partial)
    write_durably(partial / layout.COMPLETE, files.marker_text(partial))
    sync_folder(partial)
    os.rename(partial, target)
    sync_folder(target.parent)
    sync_folder(target.parent.parent)


def _work(run_dir: Path) -> list[str]:
    """Entries of a run directory that a fresh start would bury."""
    if not run_dir.is_dir():
        return []
    found = sorted(entry.name for entry in run_dir.iterdir() if not any(re.fullmatch(pattern, entry.name) for pattern in STARTERS))
    return [] if set(found) <= {LOG_NAME, "wandb", "hang"} and not _has_trained(run_dir / LOG_NAME) else found


def _has_trained(log: Path) -> bool:
    """Whether a log tells of steps, or of nothing at all; one that was opened by a start which was stopped before its first step does not."""
    try:
        kinds = {record["kind"] for record in read_log(log)}
    except UserError:
        return True
    return "run" not in kinds or "train" in kinds


def _never_saved(run_dir: Path, work: list[str]) -> bool:
    """Whether all that lies there, besides no checkpoint, is the log of steps that none has ever followed."""
    if not set(work) <= {LOG_NAME, CHECKPOINTS, "wandb", "hang"} or LOG_NAME not in work:
        return False
    try:
        return not any(record.get("event") in ("checkpoint", "resume") for record in read_log(run_dir / LOG_NAME))
    except UserError:
        return False


def _set_log_aside(run_dir: Path) -> Path:
    aside = _free_name(run_dir / LOG_NAME, ".old")
    os.rename(run_dir / LOG_NAME, aside)
    sync_folder(run_dir)
    return aside


def _write_state(partial: Path, state: TrainState, config: str) -> list[str]:
    """Add what only the writer knows; the files that it sees then."""
    write_durably(partial / layout.TRAIN_STATE, redact(state.to_json()))
    write_durably(partial / CONFIG, redact(config))
    return files.content(partial)


def _set_aside(folder: Path) -> Path:
    """Rename a damaged checkpoint; its new name."""
    aside = _free_name(folder, DAMAGED)
    os.rename(folder, aside)
    sync_folder(folder.parent)
    return aside


def _free_name(path: Path, suffix: str) -> Path:
    """`path` with `suffix`-1, -2, …: the first that is not taken."""
    number = 1
    while (name := path.with_name(f"{path.name}{suffix}-{number}")).exists():
        number += 1
    return name


def _remove(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)
