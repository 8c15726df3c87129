"""The first model is loaded once, while the service is imported, on the thread on which it then computes."""

import json
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import CancelledError
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from kvasir.errors import FailedPrecondition
from kvasir.server.interceptors import settle_garbage

from inference_svc.engine.engine import Engine
from inference_svc.first_model import FirstModel
from inference_svc.kv.model_hooks.few_rows import JointProducts
from inference_svc.machine.kv_budget import claims_of_device
from inference_svc.model import device_memory, kvasir_tiny, loading

TINY = str(kvasir_tiny.path())


class Loads:
    """Counts loads, and names the threads that they are on."""

    def __init__(self) -> None:
        self._load = loading.load
        self.threads: list[threading.Thread] = []

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.threads.append(threading.current_thread())
        return self._load(*args, **options)


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Loads:
    found = Loads()
    monkeypatch.setattr(loading, "load", found)
    return found


def opened(first: FirstModel, path: str, directory: Path) -> Engine:
    return first.open_engine(path, cache_dir=directory, memory_budget_bytes=1 << 24)


@pytest.mark.parametrize("arguments", [[], ["serve", "--listen", "unix:/x", "--model", f"mine={TINY}", "--model", "b"]])
def test_the_first_model_is_loaded_once_on_the_thread_that_computes(
    arguments: list[str], loads: Loads, tmp_path: Path
) -> None:
    with FirstModel(arguments) as first:
        engine = opened(first, TINY, tmp_path)
    with closing(engine):
        assert [thread.name for thread in loads.threads] == ["mlx"]
        assert loads.threads[0].is_alive(), "it is the engine's own"
        assert engine.model.name == kvasir_tiny.NAME
    assert not loads.threads[0].is_alive()


@pytest.mark.long(3)
def test_an_unloaded_first_model_leaves_neither_weights_nor_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the service lives on, and exempts what it has imported from collection while the model is loaded."""

    load = loading.load

    def settled(*args: Any, **options: Any) -> Any:
        loaded = load(*args, **options)
        projection = loaded.model.model.layers[0].self_attn.q_proj
        projection.together = JointProducts([projection])  # a ring, as on a GPU
        settle_garbage()
        return loaded

    monkeypatch.setattr(loading, "load", settled)
    device_memory.give_back(is_first=False)
    before = device_memory.active_bytes()
    with FirstModel([]) as first:
        opened(first, TINY, tmp_path).close()
        device_memory.give_back(is_first=True)
        assert device_memory.active_bytes() < before + 4096


def test_it_is_given_once_and_to_nobody_who_wants_another(loads: Loads, tmp_path: Path) -> None:
    with FirstModel(["--compute-type", "float32"]) as first:
        other = first.open_engine(TINY, cache_dir=tmp_path, memory_budget_bytes=1 << 24, compute_type="float16")
        with closing(other), closing(opened(first, TINY, tmp_path)) as again:
            assert other.model.compute_type == "float16"
            assert again.model.compute_type == "float32"
    assert len(loads.threads) == 2, "the third load was the engine's own"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--model", "no/such"],
        ["--model"],
        ["--help"],
        ["--compute-type", "float8"],
        ["--model", TINY, "--copy-weights=3"],
        ["--mod", "no/such"],
        ["--m", TINY],
        ["--nonsense"],
        ["bake"],
        ["--memory-gib", "much"],
    ],
)
def test_where_nothing_is_named_that_can_be_served_nothing_is_loaded(
    arguments: list[str], loads: Loads, capsys: pytest.CaptureFixture[str]
) -> None:
    with FirstModel(arguments):
        pass
    assert loads.threads == []
    assert capsys.readouterr() == ("", ""), "the service's own parser speaks"


def test_no_weights_are_loaded_for_which_other_engines_leave_no_room(
    loads: Loads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service claims its memory once it is imported, and is refused then."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with closing(claims_of_device()) as other:
        other.claim(lambda _: 1 << 30)
        with FirstModel(["--model", TINY, "--device-gib", "1"]) as first:
            first._next.put(None)
            first._thread.exception(60)
        assert loads.threads == []
        other.claim(lambda _: 1 << 29)
        with FirstModel(["--model", TINY, "--device-gib", "1"]) as first:
            opened(first, TINY, tmp_path).close()
    assert len(loads.threads) == 1


def test_a_model_that_cannot_be_loaded_is_refused_as_ever(loads: Loads, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "none of these"}))
    with FirstModel(["--model", str(tmp_path)]) as first, pytest.raises(FailedPrecondition, match="mlx-lm cannot load"):
        opened(first, str(tmp_path), tmp_path)
    assert len(loads.threads) == 2
    loads.threads[0].join(timeout=60)
    assert not loads.threads[0].is_alive()


def test_a_load_that_ends_in_any_way_leaves_threads_their_usual_time(monkeypatch: pytest.MonkeyPatch) -> None:
    usual_s, seen = sys.getswitchinterval(), list[float]()

    def leave(*_args: Any, **_options: Any) -> Any:
        seen.append(sys.getswitchinterval())
        raise SystemExit

    monkeypatch.setattr(loading, "load", leave)
    with FirstModel([]) as first, pytest.raises(SystemExit):
        opened(first, TINY, Path())
    assert seen[0] < usual_s == sys.getswitchinterval()


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--memory-gib", "1e9"], 78, "--memory-gib"),
        (["--nonsense"], 2, "--nonsense"),
    ],
)
@pytest.mark.long(4)
def test_a_service_that_is_refused_ends_though_its_model_is_still_read(
    arguments: list[str], code: int, said: str, tmp_path: Path
) -> None:
    """From a slow disk that takes minutes."""
    program = (
        "import sys, time\n"
        "from inference_svc import __main__\n"
        "from inference_svc.model import loading\n"
        "loading.load = lambda *_, **__: time.sleep(3600)\n"
        "sys.exit(__main__.main())\n"
    )
    words = ["serve", "--listen", f"unix:{tmp_path / 's'}", "--state-dir", str(tmp_path), *arguments]
    ended = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=60)
    assert ended.returncode == code
    assert said in ended.stderr


def test_a_service_that_is_refused_leaves_no_thread(loads: Loads) -> None:
    with FirstModel([]):
        pass
    for thread in threading.enumerate():
        if thread.name in ("mlx", "first-model"):
            thread.join(timeout=60)
    assert len(loads.threads) == 1
    assert not loads.threads[0].is_alive()


def test_a_service_that_cannot_be_imported_leaves_no_thread(loads: Loads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "inference_svc.formats.grammars", None)
    first = FirstModel([])
    with pytest.raises(ImportError), first:
        pass
    assert isinstance(first._thread.exception(60), CancelledError)
    assert len(loads.threads) == 1
