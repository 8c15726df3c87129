"""Progress of transfers, on stderr of a terminal and nowhere else."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from kvasir.cachestore.v1 import cachestore_pb2 as pb
from kvasir.cli.caller import Caller


@contextmanager
def transfer_progress(caller: Caller, title: str) -> Iterator[Callable[[pb.TransferProgress], None]]:
    """Show a bar of bytes. Yields the function that takes the transfer's reports."""
    columns = (DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
    with _bar(caller, title, *columns) as on_progress:
        yield lambda progress: on_progress(progress.bytes_done, progress.bytes_total)


def counting_progress(caller: Caller, title: str) -> AbstractContextManager[Callable[[int, int], None]]:
    """Show how many of all things are done."""
    return _bar(caller, title, TextColumn("{task.completed}/{task.total}"))


@contextmanager
def _bar(caller: Caller, title: str, *columns: ProgressColumn) -> Iterator[Callable[[int, int], None]]:
    name, hidden = TextColumn("{task.description}", markup=False), not caller.shows_progress
    shown = (SpinnerColumn(), name, BarColumn(), *columns)
    with Progress(*shown, console=caller.err, transient=True, disable=hidden) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
