"""A prefix that comes from the store more slowly than it is computed: computed, with the reason, and the same reply."""

import json
import random
import time
from pathlib import Path

import pytest
from kvasir.inference.v1 import inference_pb2 as pb

from tests.inference.engine.tiny_models import LLAMA, write_model
from tests.inference.service.stores.slow_link import SlowLink
from tests.running.system_fixtures import House

GREEDY = {"max_tokens": 8}


WIDE = LLAMA | {"num_attention_heads": 32, "num_key_value_heads": 32}
"""Quickly computed, and large in the store."""
SHARED_TOKENS = 1_024
SHARED_BYTES = 7_000_000


def prompt(seed: int, tokens: int = SHARED_TOKENS + 30) -> str:
    """So many tokens, the same for the same seed."""
    return "".join(random.Random(seed).choices(["<|im_start|>", "<|im_end|>"], k=tokens))


def slower_than(computed_s: float) -> float:
    """Bytes per second of a link on which the shared tokens take four times as long as they were computed in."""
    return min(1_000_000, SHARED_BYTES / (4 * computed_s))


def wait_until_known(file: Path) -> None:
    """Until the engine has written the cost of a restore."""
    while not file.exists() or not json.loads(file.read_text())["costs"]["restoring"]:
        time.sleep(0.1)


@pytest.mark.long(31)
def test_behind_a_slow_link_a_common_prefix_is_computed_and_an_agents_own_memory_is_restored(tmp_path: Path) -> None:
    house = House(tmp_path, write_model(tmp_path / "wide", WIDE))
    store_socket = Path(house.store.address.removeprefix("unix:"))
    link = SlowLink(store_socket.with_name("slow"), store_socket)
    house.engine.options += ["--store", link.address, "--store-budget-ms", "200000"]
    try:
        house.start()
        with house.client() as client:
            first, second = (
                client.reply(agent_id=f"giver {seed}", prompt=prompt(seed), sampling=GREEDY) for seed in (1, 2)
            )
        house.engine.kill()
        house.engine.start()
        with house.client() as client:
            began = time.monotonic()
            client.reply(prompt=prompt(3, SHARED_TOKENS), sampling=GREEDY)  # of which nothing is stored
            link.bytes_per_s = slower_than(time.monotonic() - began)
            restored = client.reply(agent_id="one", prompt=prompt(1), sampling=GREEDY)
            computed = client.reply(agent_id="two", prompt=prompt(2), sampling=GREEDY)
        wait_until_known(tmp_path / "state" / "restore-costs.json")
        house.engine.kill()
        house.engine.start()
        with house.client() as client:
            at_once = client.reply(agent_id="three", prompt=prompt(1), sampling=GREEDY)
            link.bytes_per_s = None  # the engine does not know it
            own = client.reply(agent_id="giver 2", prompt=prompt(2) + second.text + "Go on.", sampling=GREEDY)
            [counted] = client.get_stats().namespaces
        assert restored.started.source == pb.CACHE_SOURCE_SHARED
        assert (computed.started.source, computed.started.cached_tokens) == (pb.CACHE_SOURCE_COLD, 0)
        assert computed.started.miss == pb.MISS_REASON_COMPUTED
        assert "restoring 1024 tokens was expected to take" in computed.started.reason
        assert at_once.started.miss == pb.MISS_REASON_COMPUTED, "a restart forgets nothing"
        replies = [each.token_ids for each in (restored, computed, at_once)]
        assert replies == [each.token_ids for each in (first, second, first)]
        assert own.started.source == pb.CACHE_SOURCE_WARM, "tokens of its reply would get other bits"
        assert counted.misses["computed"] == 1
    finally:
        link.close()
        house.close()
