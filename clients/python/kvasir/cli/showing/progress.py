"""Progress of transfers, on stderr of a terminal and nowhere else."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
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
    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=caller.err,
        transient=True,
        disable=not caller.shows_progress,
    )
    with bar:
        task = bar.add_task(title, total=None)

        def on_progress(progress: pb.TransferProgress) -> None:
            bar.update(task, total=progress.bytes_total, completed=progress.bytes_done)

        yield on_progress


@contextmanager
def counting_progress(caller: Caller, title: str) -> Iterator[Callable[[int, int], None]]:
    """Show how many of all things are done."""
    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        console=caller.err,
        transient=True,
        disable=not caller.shows_progress,
    )
    with bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, total=total, completed=done)
