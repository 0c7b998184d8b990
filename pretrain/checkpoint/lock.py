"""One program at a time in a run directory: a lock beside it, taken before anything is written there.

runs/.NAME.lock says who trains in runs/NAME; its modification time is a heartbeat that a thread renews. Whether its owner still lives is
answered by whoever knows best:

    the kernel        keeps an flock on the file for as long as the process lives, however that ends: on one machine a killed run can be
                      resumed at once. Many network file systems pass the lock on to other machines; nothing here depends on it.
    this machine      knows its processes, where a file system has no flock; and none of them survives a reboot.
    Slurm             starts a job again only after its former life has ended.
    the heartbeat     decides between machines: an owner that is silent for STALE_SECONDS is gone.

The lock lies beside the directory, so that moving or copying a run takes no lock with it. Clocks of machines that share a file system are
taken to agree to a minute.
"""

import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from pretrain.checkpoint.peers import DiskError, Peers
from pretrain.errors import UserError
from pretrain.redaction import redact

STALE_SECONDS = 600
"""An owner on another machine that gave no sign for so long is gone."""
HEARTBEAT_SECONDS = 30
RETRY_SECONDS = 5
_RESTART_COUNTS = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")


def say_to_user(text: str) -> None:
    """A line on standard output, without secrets."""
    print(redact(text), flush=True)


@dataclass(frozen=True, kw_only=True)
class Owner:
    """Who holds a lock.

    host, boot     the machine's name, and which start of its kernel this is.
    pid, born      the process, and when it started (Unix seconds): numbers of processes are used again.
    since          when it took the lock (Unix seconds).
    job, restarts  Slurm's job and how often Slurm started it again; empty and 0 without Slurm.
    """

    host: str
    boot: str
    pid: int
    born: float
    since: float
    job: str
    restarts: int

    @staticmethod
    def this_process() -> "Owner":
        """The owner that this process would be."""
        return Owner(
            host=socket.gethostname(),
            boot=_boot(),
            pid=os.getpid(),
            born=psutil.Process().create_time(),
            since=time.time(),
            job=os.environ.get("SLURM_JOB_ID", ""),
            restarts=int(os.environ.get("SLURM_RESTART_COUNT") or 0),
        )


class RunLock:
    """The lock of one run directory, on the process that writes there; it is taken once. say: receives a line when a dead owner is followed."""

    def __init__(self, run_dir: Path, say: Callable[[str], None] = say_to_user) -> None:
        real = Path(os.path.realpath(run_dir))  # one directory under two names has one lock
        self.run_dir, self.path, self._say = run_dir, real.with_name(f".{real.name}.lock"), say
        self._descriptor: int | None = None
        self._stop = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="run lock", daemon=True)

    def acquire(self) -> None:
        """Take the lock. Raises UserError, having touched nothing, while another process holds it; OSError if the disk refuses.

        A start that Slurm or torchrun repeats waits for its former life to be found gone.
        """
        deadline = time.monotonic() + (STALE_SECONDS + HEARTBEAT_SECONDS if restarted() else 0)
        waiting = False
        while (refusal := self._try()) is not None:
            if time.monotonic() >= deadline:
                raise UserError(refusal)
            if not waiting:
                self._say(f"waiting for the former life of this job to end: {refusal}")
                waiting = True
            time.sleep(RETRY_SECONDS)
        self._heart.start()

    def release(self) -> None:
        """Give the lock back; nothing happens if it is not held."""
        if self._descriptor is None:
            return
        self._stop.set()
        self._heart.join()
        if _is_at(self._descriptor, self.path):
            self.path.unlink(missing_ok=True)  # before the flock goes: whoever waits for it then finds that the file is another one
        os.close(self._descriptor)
        self._descriptor = None

    def _try(self) -> str | None:
        """Take the lock, or say why not."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            try:
                descriptor, made = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644), True
            except FileExistsError:
                try:
                    descriptor, made = os.open(self.path, os.O_RDWR), False
                except FileNotFoundError:
                    continue  # given back in between
            try:
                refusal = self._claim(descriptor, made)
            except BaseException:
                os.close(descriptor)
                raise
            if refusal is None and _is_at(descriptor, self.path):
                self._descriptor = descriptor
                return None
            os.close(descriptor)
            if refusal is not None:
                return refusal

    def _claim(self, descriptor: int, made: bool) -> str | None:
        """Write this process into the open lock file, or say whose it is."""
        locked = _flock(descriptor)
        if not made:
            owner, age = _read(descriptor), max(time.time() - os.fstat(descriptor).st_mtime, 0.0)
            if locked is False or not _is_gone(owner, age, locked is True):
                return self._refusal(owner, age)
            if owner is not None and _is_at(descriptor, self.path):
                self._say(f"{self.run_dir}: taking over from process {owner.pid} on {owner.host}, which ended without giving its lock back")
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(asdict(Owner.this_process())).encode(), 0)
            os.fsync(descriptor)
        except OSError:
            self.path.unlink(missing_ok=True)  # an empty lock would look like a start in progress
            raise
        return None

    def _refusal(self, owner: Owner | None, age: float) -> str:
        if owner is None:
            return f"{self.run_dir} is being started by another process ({self.path}); wait a moment, or choose another name="
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(owner.since))
        who = f"{self.run_dir} is in use by process {owner.pid} on host {owner.host} since {since}"
        if owner.boot == _boot():
            return f"{who}; stop that one first, or choose another name="
        return (
            f"{who} (last sign of life {age:.0f} s ago); stop that one first, or choose another name= (should it be dead, the run is free "
            f"{STALE_SECONDS // 60} minutes after its last sign, or as soon as you delete {self.path})"
        )

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_SECONDS):
            try:
                assert self._descriptor is not None
                os.utime(self._descriptor)
            except OSError:
                continue  # a moment's trouble of a network disk; ten minutes of it stop the saves, too


def lock_run(run_dir: Path, peers: Peers, say: Callable[[str], None] = say_to_user) -> RunLock:
    """Take the lock of a run directory on the writer. Every rank calls it and, if it is refused, raises the same UserError."""
    lock = RunLock(run_dir, say)
    try:
        peers.writer(lock.acquire)
    except DiskError as error:
        raise UserError(f"the run directory {run_dir} cannot be used: {error}; check the path and its permissions, or choose another root=") from None
    return lock


def restarted() -> bool:
    """Whether a scheduler started this command again."""
    return any(os.environ.get(name, "0") not in ("", "0") for name in _RESTART_COUNTS)


def _is_gone(owner: Owner | None, age: float, locked: bool) -> bool:
    """Whether an owner is known to live no more. locked: this process got the flock."""
    if owner is not None:
        if owner.boot == _boot():
            return locked or not _lives(owner)
        if owner.host == socket.gethostname() and time.time() - age < psutil.boot_time():
            return True
        if owner.job and owner.job == os.environ.get("SLURM_JOB_ID") and owner.restarts < int(os.environ.get("SLURM_RESTART_COUNT") or 0):
            return True
    return age > STALE_SECONDS


def _lives(owner: Owner) -> bool:
    try:
        process = psutil.Process(owner.pid)
        return abs(process.create_time() - owner.born) < 2 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:
        return True  # it is there, and hidden from us


def _flock(descriptor: int) -> bool | None:
    """Whether the lock was got; None where the file system has none."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _read(descriptor: int) -> Owner | None:
    """Who the file says it is; None while it is being written, or if it is damaged."""
    try:
        return Owner(**json.loads(os.pread(descriptor, 1 << 16, 0)))
    except (ValueError, TypeError):
        return None


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether an open file is still the one called `path`."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _boot() -> str:
    """Which start of which kernel this is."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"{socket.gethostname()}/{psutil.boot_time():.0f}"
