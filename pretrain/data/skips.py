"""Steps of text that a run has left out: the map from optimizer steps to steps of the data stream, which differ after a rewind."""

from collections.abc import Iterable


class Skips:
    """Grows by `rewind`; `entries` is [[optimizer step from which on, steps of text left out there], …], as checkpoints keep it."""

    def __init__(self, entries: Iterable[Iterable[int]] = ()) -> None:
        self.entries: list[list[int]] = [list(entry) for entry in entries]

    def rewind(self, to: int, bad: int) -> int:
        """Optimizer step `bad` (0-based) went wrong, and the run goes on from step `to`, with the text after that of `bad`: the number of steps
        of text that are left out there now."""
        first, after = self.data_step(to), self.data_step(bad) + 1
        self.entries = [entry for entry in self.entries if entry[0] <= to] + [[to, after - first]]
        return after - first

    def data_step(self, step: int) -> int:
        """The step of the data stream that optimizer step `step` reads."""
        return step + sum(count for at, count in self.entries if at <= step)

    def step_of(self, data_step: int) -> int:
        """The optimizer step that reads a step of the data stream; for one that is left out, the step that took its place."""
        step = data_step
        for at, count in sorted(self.entries):
            if step >= at:
                step = max(step - count, at)
        return step
