"""The parts that serve a model, where one of them cannot be made."""

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from inference_svc import model_opening
from inference_svc.config import EngineSettings
from inference_svc.memory.service_stats import ServiceStats
from inference_svc.model_opening import ModelsParts, open_served
from inference_svc.turns.admission import Admission


def test_an_engine_that_cannot_be_served_ends(tmp_path: Path) -> None:
    """Its thread and its weights would stay beside those of the model that is loaded next."""
    settings, clock, closed = EngineSettings(listen="unix:/nowhere", state_dir=tmp_path), time.monotonic, list[bool]()
    admission, stats = Admission(settings.admission, clock), ServiceStats(clock())
    parts = ModelsParts(settings, {}, "owner", admission, stats, clock, lambda: 0, lambda: 0)

    def opened(_path: str, **_options: Any) -> Any:
        tokenizer = SimpleNamespace()  # which tells nothing of its tokens
        return SimpleNamespace(
            memory_budget_bytes=1 << 20, tokenizer=tokenizer, token_text=None, close=lambda: closed.append(True)
        )

    with pytest.raises(AttributeError):
        asyncio.run(open_served("odd", "/odd", parts, opened))
    assert closed == [True]


async def test_memory_for_the_first_files_of_a_restore_is_made_ready_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, done = list[int](), list[str]()

    async def warm_up_text(_: object) -> None:
        done.append("text")

    async def warm_up() -> None:
        done.append("engine")

    monkeypatch.setattr(model_opening, "warm_up_text", warm_up_text)
    engine: Any = SimpleNamespace(model=SimpleNamespace(kv_bytes_per_token=36_864))
    store: Any = SimpleNamespace(blobs=SimpleNamespace(make_ready=asked.append))
    prompting: Any = None
    for stores in ({"one": store, "another": store}, {}):
        await model_opening._make_ready(engine, prompting, stores, asyncio.ensure_future(warm_up()))
    assert asked == [256 * 36_864 + (1 << 20)]
    assert sorted(done) == ["engine", "engine", "text", "text"]
