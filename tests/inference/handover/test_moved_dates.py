"""A turn that moves while it speaks takes along the date that its template printed, and its budget of thoughts."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from kvasir.cachestore.v1 import manifest_pb2
from kvasir.clients import AioInferenceClient
from kvasir.formats import manifest
from kvasir.inference.v1 import inference_pb2 as pb

from tests.inference.handover.cases import ON
from tests.inference.handover.two_engines import TwoEngines, hear, two_engines
from tests.made_models.dated_model import date_of, dated
from tests.made_models.thinking_models import THINK, THOUGHT, write_thinking_model

BUDGET = 30
UNENDING = {**ON["logit_bias"], THINK: -100.0, THOUGHT: -100.0}  # type: ignore[dict-item]
TURN: dict[str, Any] = {
    "agent_id": "ada",
    "sampling": {"logit_bias": UNENDING, "max_tokens": 60},
    "thinking": pb.Thinking(budget_tokens=BUDGET),
}


@pytest.mark.long(6)
def test_the_next_turn_over_there_has_its_date_and_its_thoughts_their_end(tmp_path: Path) -> None:
    with two_engines(
        tmp_path, dated(write_thinking_model(tmp_path / "thinking", "deepseek-v3.2"), tmp_path / "model")
    ) as two:
        asyncio.run(_moves(two))


async def _moves(two: TwoEngines) -> None:
    async with two.clients() as (a, b), asyncio.timeout(120):
        await hear(a, append_messages=[{"role": "user", "content": "My name is Anna."}], **TURN)
        begun = await _remembered(a)
        moved = await hear(a, {5: (a, "b")}, append_messages=[{"role": "user", "content": "Tell me more."}], **TURN)
        assert moved.moves, moved.not_moved
        assert moved.reply.token_ids.index(THOUGHT) == BUDGET
        after = await _remembered(b)
        assert after.template_time_ms == begun.template_time_ms > 0
        assert date_of(begun.template_time_ms) in after.text
        last = await hear(b, append_messages=[{"role": "tool", "content": "And then?"}], **TURN)
        assert last.reply.started.cached_tokens > moved.reply.finished.memory_tokens - 4


async def _remembered(client: AioInferenceClient) -> manifest_pb2.Manifest:
    return manifest.parse((await client.get_snapshot("ada"))[1])
