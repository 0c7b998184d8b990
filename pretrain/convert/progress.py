"""A bar over the bytes of a conversion, with rate and time to go; on a terminal only."""

import sys
from collections.abc import Iterable, Iterator

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from torch import Tensor


def shown(what: str, total: int, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The tensors as they come, counted on the screen; `total`: their bytes."""
    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=sys.stderr), disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task(what, total=total)
        for name, tensor in tensors:
            yield name, tensor
            progress.advance(task, tensor.nbytes)
