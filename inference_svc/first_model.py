"""Loads the first model's weights, on the MLX thread, while the process still imports the rest of the service. Where
threads copy them to a device they begin with it before the modules that load a model are imported.
"""

import argparse
import contextlib
import os
import re
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeAlias

from kvasir.options.engine import EngineTable
from kvasir.options.finding import ENVIRONMENT, FLAG, Given, add_options, environment, find
from kvasir.options.table import options_of
from kvasir.options.texts import texts_of
from kvasir.waits import giving_way

from inference_svc.engine.first_operations import run_first_operations
from inference_svc.engine.mlx_thread import MlxThread
from inference_svc.kv.host_copies.host_copy import copies_itself, takes_out
from inference_svc.kv.kept_files import KeptDirs, kept_folder
from inference_svc.machine.kv_budget import claims_of_device, held_of, total_bytes, weights_on_disk
from inference_svc.model import kvasir_tiny
from inference_svc.model.device_memory import prepare_device
from inference_svc.model.model_identity import begin_digests
from inference_svc.model.weights.placing import ComingWeights
from inference_svc.model.weights.weight_files import weight_files

if TYPE_CHECKING:
    from inference_svc.engine.engine import Engine
    from inference_svc.kv.attention.choice import Wanted
    from inference_svc.model.loading import LoadedModel

_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_Given: TypeAlias = tuple[Path, str | None, bool, "Wanted"]  # directory, compute type, whether weights are copied
_NAMES = ("model", "compute_type", "copy_weights", "kernels", "device_gib", "state_dir")


class FirstModel:
    """What the command line and the environment name as the first model, if it is a directory; else nothing."""

    def __init__(self, arguments: Sequence[str]) -> None:
        """Begin to load. Never raises."""
        self._given: _Given | None = None
        self._device_gib: float | None = None
        self._state_dir = Path()
        self._is_imported = Event()  # set once the modules that load a model are there, or will never be
        self._loaded: LoadedModel | None = None
        # What the thread goes on with; None: with nothing. Not kept: who makes a worker holds its weights and pages.
        self._next: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self._is_taken = False
        self._thread: Future[MlxThread[Any]] = Future()
        with contextlib.suppress(Exception):
            self._given, self._device_gib, self._state_dir = _asked(arguments)
        if self._given is not None:
            Thread(target=self._begin, name="first-model").start()

    def __enter__(self) -> Self:
        try:  # by one thread: two may not import transformers' parts at once
            import inference_svc.formats.grammars
            import inference_svc.model.loading  # noqa: F401
        except BaseException:
            self._next.put(None)  # else the process waits for its thread for ever
            raise
        finally:
            self._is_imported.set()
        return self

    def __exit__(self, *_: object) -> None:
        self._next.put(None)

    def leave(self, code: int) -> int:
        """The exit code of a service that ends. A refused one exits here: the interpreter would wait for weights."""
        if self._given is None or self._is_taken or self._thread.done():
            return code
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def open_engine(self, path: str, **options: Any) -> "Engine":
        """As `Engine.open`; the first model is there, or on its way."""
        from inference_svc.engine.engine import Engine
        from inference_svc.model.open_model import open_model

        if self._given is None or Path(path).expanduser() != self._given[0] or self._is_taken:
            return Engine.open(path, **options)
        return Engine.open(path, opener=partial(open_model, load=self._load), start=self._start, **options)

    def _begin(self) -> None:
        try:
            self._thread.set_result(MlxThread(self._worker))
        except BaseException as error:  # noqa: BLE001 - raised again where the engine is opened
            self._thread.set_exception(error)

    def _worker(self) -> Any:
        # Threads that copy weights are many, and each waits so long for an import to let it go on.
        with giving_way():
            with contextlib.suppress(Exception):
                self._loaded = self._loaded_ahead()
            if (make_worker := self._next.get()) is None:
                raise CancelledError
            return make_worker()

    def _loaded_ahead(self) -> "LoadedModel | None":
        assert self._given is not None
        directory, compute_type, copies, kernels = self._given
        if not _has_room(directory, self._device_gib):
            return None
        prepare_device()
        coming = None
        if copies_itself() and not copies:
            takes_out()  # found out while no thread copies yet: pages wait for it
            files = weight_files(directory)
            digests = begin_digests(files, self._state_dir)
            coming = ComingWeights(files, digests, partial(run_first_operations, directory))
        self._is_imported.wait()
        kept = KeptDirs(self._state_dir, kept_folder())
        return _load(directory, compute_type, copies_weights=copies, kernels=kernels, kept=kept, coming=coming)

    def _load(
        self,
        directory: Path,
        compute_type: str | None,
        *,
        copies_weights: bool,
        kernels: "Wanted",
        kept: KeptDirs,
    ) -> "LoadedModel":
        loaded, self._loaded = self._loaded, None
        if loaded is None or (directory, compute_type, copies_weights, kernels) != self._given:
            return _load(directory, compute_type, copies_weights=copies_weights, kernels=kernels, kept=kept)
        return loaded

    def _start(self, make_worker: Callable[[], Any]) -> MlxThread[Any]:
        self._is_taken = True
        self._next.put(make_worker)
        return self._thread.result()


def _load(*given: Any, **options: Any) -> "LoadedModel":
    from inference_svc.model import loading

    return loading.load(*given, **options)


def named_model(item: str) -> tuple[str, str]:
    """NAME=PATH, or PATH, which is then its own name. A path may hold an equals sign; a name holds no slash."""
    name, equals, path = item.partition("=")
    if equals and _MODEL_NAME.fullmatch(name):
        return name, path
    return (kvasir_tiny.name_of(Path(item)) if Path(item).is_dir() else item), item


def add_command_line(parser: argparse.ArgumentParser) -> None:
    """All of the service's: an option may be abbreviated as long as no other begins so."""
    parser.add_argument("command", nargs="?", choices=["serve"], default="serve", help=argparse.SUPPRESS)
    add_options(parser, EngineTable)


class _Parser(argparse.ArgumentParser):
    """It reports nothing: what it refuses the service's own parser refuses, with a message."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)

    def print_help(self, file: Any = None) -> None:  # noqa: ARG002 - as it is called
        raise ValueError("nothing is to be served")


def _has_room(directory: Path, device_gib: float | None) -> bool:
    """Whether other engines leave room for the weights: the service claims it later, and is refused before it loads."""
    with contextlib.closing(claims_of_device()) as claims:
        total = total_bytes(device_gib)
        return weights_on_disk([str(directory)]) + max(claims.of_others(), held_of(total)) <= total


def _asked(arguments: Sequence[str]) -> tuple[_Given | None, float | None, Path]:
    parser, options = _Parser(), options_of(EngineTable)
    add_command_line(parser)
    given = vars(parser.parse_args(arguments))
    flags = {
        name: Given(texts_of(option, given[name]), option.flag)
        for name, option in options.items()
        if given[name] is not None
    }
    found = find(EngineTable, {FLAG: flags, ENVIRONMENT: environment(EngineTable)})
    models, compute_type, copies, kernels, device_gib, state_dir = (found[name].value for name in _NAMES)
    place = named_model(models[0])[1] if models else kvasir_tiny.NAME
    path = kvasir_tiny.shipped().get(place) or Path(place).expanduser()
    is_there = (path / "config.json").is_file()
    return (path, compute_type, bool(copies), kernels) if is_there else None, device_gib, state_dir
