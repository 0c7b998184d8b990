"""Work done ahead of the training loop, in a thread: a bounded queue whose errors reach the consumer and which always shuts down."""

import queue
import threading
import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class _Failed:
    def __init__(self, error: BaseException) -> None:
        self.error = error


class Prefetcher(Generic[T]):
    """Iterates `source` in a thread of its own, at most `depth` items ahead.

    An exception of `source` is raised, as it was, by the `next` that asks for the item that failed. `close` (also on garbage
    collection) stops the thread; the thread holds no reference to this object.
    """

    def __init__(self, source: Iterator[T], depth: int, name: str) -> None:
        items: queue.Queue[T | _Failed] = queue.Queue(maxsize=max(depth, 1))
        stop = threading.Event()
        self._items, self._ended = items, False
        self._thread = threading.Thread(target=_produce, args=(source, items, stop), name=name, daemon=True)
        self._finalizer = weakref.finalize(self, _shut_down, self._thread, items, stop)
        self._thread.start()

    def __iter__(self) -> "Prefetcher[T]":
        return self

    def __next__(self) -> T:
        if self._ended or not self._finalizer.alive:
            raise StopIteration
        item = self._items.get()
        if isinstance(item, _Failed):
            self._ended = True
            raise item.error
        return item

    def ready(self, timeout: float) -> bool:
        """Whether `next` would return at once, after waiting for that for at most `timeout` seconds."""
        if self._ended or not self._finalizer.alive:
            return True
        with self._items.not_empty:
            return self._items.not_empty.wait_for(lambda: self._items._qsize() > 0, timeout)

    def close(self) -> None:
        """Stop the thread and wait for it; later calls of `next` raise StopIteration."""
        self._finalizer()


def _produce(source: Iterator[T], items: "queue.Queue[T | _Failed]", stop: threading.Event) -> None:
    try:
        for item in source:
            if not _put(items, item, stop):
                return
        _put(items, _Failed(StopIteration()), stop)
    except BaseException as error:  # whatever it is, the consumer must see it instead of waiting for ever
        _put(items, _Failed(error), stop)


def _put(items: "queue.Queue[T | _Failed]", item: "T | _Failed", stop: threading.Event) -> bool:
    while not stop.is_set():
        try:
            items.put(item, timeout=0.1)
            return True
        except queue.Full:
            continue
    return False


def _shut_down(thread: threading.Thread, items: "queue.Queue[T | _Failed]", stop: threading.Event) -> None:
    stop.set()
    while not items.empty():
        items.get_nowait()
    if thread is not threading.current_thread():
        thread.join()
