"""Agreement between ranks: what every rank must know before any of them goes on."""

import errno
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from pretrain.errors import UserError

T = TypeVar("T")

APART_HOURS = 12
"""How long a rank waits for the others' writing. A rank that dies is noticed at once."""
WRITER_WORDS = ("PytorchStreamWriter", "inline_container", "I/O error", "os error", "unexpected pos")
"""How torch.save's and safetensors' own writers word a failed write; neither raises OSError."""


@dataclass(frozen=True)
class Peers:
    """The ranks that save and load together.

    exchange  every rank gives a value and gets all values in rank order (an all-gather of small objects); it is also a barrier.
    """

    rank: int
    size: int
    exchange: Callable[[Any], list[Any]]

    @property
    def is_writer(self) -> bool:
        """The one rank that makes, renames and deletes folders."""
        return self.rank == 0

    @staticmethod
    def alone() -> "Peers":
        """One process."""
        return Peers(0, 1, lambda value: [value])

    @staticmethod
    def world() -> "Peers":
        """All ranks of torch.distributed; `alone` where it is not initialised."""
        import torch.distributed as dist

        if not dist.is_initialized() or dist.get_world_size() == 1:
            return Peers.alone()
        return Peers(dist.get_rank(), dist.get_world_size(), _gathering(None))

    @staticmethod
    def apart() -> "Peers":
        """The same ranks over a gloo group of their own, for exchanges that must not meet those of training: one thread may use it.

        Every rank calls it, at the same place. It waits for a slow disk: up to APART_HOURS.
        """
        import torch.distributed as dist

        if not dist.is_initialized() or dist.get_world_size() == 1:
            return Peers.alone()
        return Peers(dist.get_rank(), dist.get_world_size(), _gathering(dist.new_group(backend="gloo", timeout=timedelta(hours=APART_HOURS))))

    def everyone(self, action: Callable[[], T]) -> list[T]:
        """Run `action` on every rank; all results in rank order.

        If it fails anywhere, every rank raises: DiskError where the disk refused, the same UserError, or RuntimeError naming the rank for
        anything else (the rank itself raises its own exception). `action` must hold no collective that a failing rank would miss.
        """
        value, failure = None, None
        try:
            value = action()
        except Exception as error:
            failure = error
        answers = self.exchange((value, failure and _describe(failure)))
        for rank, (_, told) in enumerate(answers):
            if told is not None:
                kind, words = told
                self._raise(rank, kind, words, failure)
        return [value for value, _ in answers]

    def writer(self, action: Callable[[], T]) -> T:
        """Run `action` on the writer; every rank gets its result, or raises as `everyone` does."""
        return self.everyone(lambda: action() if self.is_writer else None)[0]  # type: ignore[return-value]

    def _raise(self, rank: int, kind: str, words: str, own: Exception | None) -> None:
        if kind == "user":
            raise UserError(words) from None
        if kind == "disk":
            raise DiskError(words if self.size == 1 else f"{words} (rank {rank})") from own
        if own is not None:
            raise own
        raise RuntimeError(f"rank {rank} failed: {words}")


def _gathering(group: Any) -> Callable[[Any], list[Any]]:
    import torch.distributed as dist

    def exchange(value: Any) -> list[Any]:
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value, group=group)
        return values

    return exchange


class DiskError(Exception):
    """The disk refused, on some rank. The message says what and where."""


def disk_trouble(error: Exception) -> str | None:
    """What the operating system said about a failed file operation ("No space left on device: PATH"); None if that is not what happened."""
    for cause in _chain(error):
        if isinstance(cause, OSError) and cause.errno is not None:
            where = f": {cause.filename}" if cause.filename else ""
            return f"{cause.strerror or errno.errorcode.get(cause.errno, 'I/O error')}{where}"
    if any(word in str(error) for word in WRITER_WORDS):
        return str(error).splitlines()[0]
    return None


def _describe(error: Exception) -> tuple[str, str]:
    """Kind (user, disk, bug) and words of a failure, to be told to the other ranks."""
    if isinstance(error, UserError):
        return "user", str(error)
    trouble = disk_trouble(error)
    return ("bug", f"{type(error).__name__}: {error}") if trouble is None else ("disk", trouble)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
