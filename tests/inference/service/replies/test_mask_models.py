"""A WeDLM model behind the service: streamed, counted, remembered, killed in mid-window and back. Real processes."""

import threading
from collections.abc import Iterator

import pytest
from kvasir.clients import InferenceClient
from kvasir.errors import FailedPrecondition, KvasirError

from tests.inference.engine.wedlm.tiny_wedlm import write_wedlm
from tests.running.system_fixtures import House, running_house

FIRST, NEXT = "The blue key opens the third door; Marla keeps it in the tin box. " * 6, " And who keeps it?"
GREEDY = {"max_tokens": 32}


@pytest.fixture(scope="module")
def masked_house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    root = tmp_path_factory.mktemp("masked")
    with running_house(root, write_wedlm(root / "model")) as house:
        yield house


def turns(client: InferenceClient, agent: str) -> list[list[int]]:
    first = client.reply(agent_id=agent, prompt=FIRST, sampling=GREEDY)
    return [first.token_ids, continued(client, agent, first.text)]


def continued(client: InferenceClient, agent: str, said: str) -> list[int]:
    return client.reply(agent_id=agent, prompt=FIRST + said + NEXT, sampling=GREEDY).token_ids


def kill_at_first_text(house: House, client: InferenceClient, prompt: str) -> None:
    killer = threading.Timer(0, house.kill)
    try:
        for response in client.generate(agent_id="killed", prompt=prompt, sampling={"max_tokens": 600}):
            if response.WhichOneof("event") == "delta" and killer.ident is None:
                killer.start()
    finally:
        killer.join()


@pytest.mark.long(4)
def test_an_agent_whose_engine_is_killed_in_mid_window_goes_on_as_one_that_never_was(masked_house: House) -> None:
    house = masked_house
    with house.client() as client:
        expected = turns(client, "never killed")
        first = client.reply(agent_id="killed", prompt=FIRST, sampling=GREEDY)
        usage = first.finished.usage
        assert 0 < usage.mask_passes.passes < usage.completion_tokens < usage.mask_passes.rows
        with pytest.raises(KvasirError):
            kill_at_first_text(house, client, FIRST + first.text + NEXT)
    house.start()
    with house.client() as client:
        assert [first.token_ids, continued(client, "killed", first.text)] == expected


@pytest.mark.long(2)
def test_an_agent_of_such_a_model_stays_awake_and_its_refusal_names_the_cause(masked_house: House) -> None:
    with masked_house.client() as client:
        client.reply(agent_id="awake", prompt=FIRST, sampling=GREEDY)
        with pytest.raises(FailedPrecondition, match="WeDLM") as refused:
            client.sleep("awake")
        assert refused.value.reason == "CANNOT_SLEEP"


def test_a_decoding_turn_of_such_a_model_is_refused_to_another_engine(masked_house: House) -> None:
    with masked_house.client() as client:
        stream = client.generate(agent_id="stays", prompt=FIRST, sampling={"max_tokens": 200})
        next(each for each in stream if each.WhichOneof("event") == "delta")
        with pytest.raises(FailedPrecondition, match="window of masks"):
            client.hand_over("other", agent_id="stays")


def test_masks_ahead_are_the_callers_choice(masked_house: House) -> None:
    with masked_house.client() as client:
        usual = client.reply(prompt=FIRST, sampling=GREEDY).finished.usage
        one = client.reply(prompt=FIRST, sampling={**GREEDY, "most_drafts": 0}).finished.usage
        assert one.mask_passes.passes >= one.completion_tokens
        assert one.mask_passes.rows <= 2 * one.mask_passes.passes
        assert usual.mask_passes.passes < one.mask_passes.passes
