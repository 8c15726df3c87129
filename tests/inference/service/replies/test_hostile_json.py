"""JSON in messages that is made to be slow: refused at once with its field, and nobody else's stream stops for it."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from kvasir import errors
from kvasir.clients import InferenceClient, message
from kvasir.common.v1 import message_pb2
from kvasir.credentials import CLIENT, Principal

from tests.running.guarded_house import guarded
from tests.running.system_fixtures import House

CALLERS = 6
TOKENS = 40
FIELD = "messages.messages[1].tool_calls[0].arguments_json"
LONG = '{"a":[' + "[]," * ((8 << 20) // 3 - 100) + "[]]}"
# What is short enough is parsed, if it is flat and has few enough values.
SHORT = [
    '{"a":[' + "[]," * ((1 << 20) // 3 - 100) + "[]]}",
    '{"a":' + "[" * 500_000 + "]" * 500_000 + "}",
    json.dumps({"a": "x" * ((1 << 20) - 100)})[:-1],
]


@pytest.fixture(scope="module")
def callers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[House, str, str]]:
    house = House(tmp_path_factory.mktemp("two"), model)
    tokens = guarded(house, [Principal(name, name, frozenset({CLIENT})) for name in ("a", "b")])
    try:
        house.start()
        yield house, tokens["a"], tokens["b"]
    finally:
        house.close()


def tokens_of_a_stream(client: InferenceClient) -> int:
    sampling = {"max_tokens": TOKENS, "temperature": 0.0, "logit_bias": {2: -100.0}}
    return len(client.reply(prompt="Tell me of the sea.", sampling=sampling, timeout_s=60).token_ids)


def refused(house: House, token: str, arguments: str) -> str:
    call = message_pb2.ToolCall(name="t", arguments_json=arguments)
    said = [
        message("user", "x"),
        message("assistant", tool_calls=[call]),
    ]
    with house.client(token) as client, pytest.raises(errors.InvalidArgument) as refusal:
        client.reply(messages=said, timeout_s=60)
    return refusal.value.field


@pytest.mark.long(4)
@pytest.mark.parametrize("arguments", [LONG, *SHORT], ids=["long", "many values", "deep", "cut"])
def test_hostile_json_stops_nobody_elses_stream(callers: tuple[House, str, str], arguments: str) -> None:
    house, attacker, other = callers
    with house.client(other) as client:
        over = threading.Event()

        def attack() -> list[str]:
            fields = [refused(house, attacker, arguments)]
            while not over.is_set():
                fields.append(refused(house, attacker, arguments))
            return fields

        with ThreadPoolExecutor(CALLERS) as pool:
            attacks = [pool.submit(attack) for _ in range(CALLERS)]
            try:
                assert tokens_of_a_stream(client) == TOKENS
            finally:
                over.set()
            assert {field for each in attacks for field in each.result()} == {FIELD}
