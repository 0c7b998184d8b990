"""A rank's state, copied to host memory, so that a file of it can be written while training changes the original.

Tensors are copied by storage: what shares memory shares it in the copy, so that torch.save makes the same file of both, byte for byte (on
CUDA but for the device that each storage says it was on).
"""

import copy
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def write_file(state: Any, path: Path) -> None:
    """torch.save, and wait until it is on the disk. Raises OSError or RuntimeError."""
    with open(path, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


@dataclass
class HostMemory:
    """Host buffers that one snapshot after another uses: page-locked memory takes seconds to get, and fresh memory a page fault every 4 KiB.

    The storages of a rank come in the same order and sizes each time. Memory that cannot be page-locked is ordinary memory.
    """

    buffers: list[torch.UntypedStorage] = field(default_factory=list)
    used: int = 0

    def take(self, source: torch.UntypedStorage) -> torch.UntypedStorage:
        """A copy of a storage; on CUDA only after `finish`."""
        if self.used == len(self.buffers) or self.buffers[self.used].nbytes() != source.nbytes():
            self.buffers[self.used : self.used + 1] = [_allocate(source.nbytes(), pinned=source.device.type == "cuda")]
        buffer = self.buffers[self.used]
        self.used += 1
        buffer.copy_(source, non_blocking=True)
        return buffer

    def finish(self) -> None:
        """Wait until what was taken is there."""
        if any(buffer.is_pinned() for buffer in self.buffers[: self.used]):
            torch.cuda.current_stream().synchronize()
        del self.buffers[self.used :]


@dataclass
class Snapshot:
    """Files to be written, their state in host memory. It holds until the next snapshot in the same memory.

    folders  relative to the checkpoint.
    states   relative path -> what torch.save is to write.
    """

    memory: HostMemory
    folders: list[Path] = field(default_factory=list)
    states: dict[Path, Any] = field(default_factory=dict)
    _storages: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    _originals: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.memory.used = 0

    def add(self, path: Path, state: Any) -> None:
        """Copy what one file is to hold. Raises MemoryError or RuntimeError where the memory does not suffice."""
        self.states[path] = self._copied(state, {})

    def finish(self) -> None:
        """The copy is complete after this."""
        self.memory.finish()
        self._storages.clear()
        self._originals.clear()

    def write(self, folder: Path) -> None:
        """Write the files below `folder`, durably. Enters no collective. Raises OSError or RuntimeError."""
        for each in self.folders:
            os.makedirs(folder / each, exist_ok=True)
        for path, state in self.states.items():
            write_file(state, folder / path)

    def _copied(self, value: Any, seen: dict[int, Any]) -> Any:
        """A copy of containers and tensors, in which what was one object is one object; anything else is shared, for it never changes."""
        if not isinstance(value, Tensor | dict | list | tuple):
            return value
        if id(value) not in seen:
            self._originals.append(value)  # while it lives, its id is its own
            seen[id(value)] = self._copy(value, seen)
        return seen[id(value)]

    def _copy(self, value: Any, seen: dict[int, Any]) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(value, seen)
        if isinstance(value, tuple):
            items = [self._copied(item, seen) for item in value]
            return value if _same(items, value) else tuple(items)
        shallow = copy.copy(value)
        for key in shallow if isinstance(shallow, dict) else range(len(shallow)):
            shallow[key] = self._copied(shallow[key], seen)
        return shallow

    def _tensor(self, value: Tensor, seen: dict[int, Any]) -> Tensor:
        source = value.untyped_storage()
        if source._cdata not in self._storages:
            self._originals.append(source)
            self._storages[source._cdata] = self.memory.take(source)
        host = torch.empty(0, dtype=value.dtype).set_(self._storages[source._cdata], value.storage_offset(), value.size(), value.stride())
        host.requires_grad_(value.requires_grad)
        if isinstance(value, torch.nn.Parameter):
            host = torch.nn.Parameter(host, value.requires_grad)
        vars(host).update({name: self._copied(attribute, seen) for name, attribute in vars(value).items()})  # DeepSpeed's ds_id
        return host


def _same(items: Iterable[Any], others: Iterable[Any]) -> bool:
    return all(item is other for item, other in zip(items, others, strict=True))


def _allocate(size: int, *, pinned: bool) -> torch.UntypedStorage:
    if pinned:
        try:
            return torch.empty(size, dtype=torch.uint8, pin_memory=True).untyped_storage()
        except RuntimeError:  # the system limits how much may be page-locked
            pass
    return torch.empty(size, dtype=torch.uint8).untyped_storage()
