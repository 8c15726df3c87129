"""Agents with a past for the operator's page: branches, a rollback, a fork, and text that looks like markup."""

import contextlib
import threading
from collections.abc import Iterator

from kvasir.clients import InferenceClient
from kvasir.inference.v1 import inference_pb2 as pb

from tests.gateway.conftest import Front

GREEDY = pb.Sampling(max_tokens=8, temperature=0)
HOSTILE = '<script>alert("x")</script>&amp;'
MARKUP = '<img src=x onerror=alert(1)> & "quotes" </p><script>alert(2)</script>'
BRANCHED = "page/ada"
_END = 2


def live(client: InferenceClient) -> None:
    """BRANCHED: versions 1 to 3, 4 from 1, 5 which is 3 again, 6. A fork of it, and one agent whose name is HOSTILE."""
    for said in ("My name is Anna.", "My dog is called Rex.", "What is my name?"):
        _say(client, BRANCHED, said)
    _say(client, BRANCHED, "What is my dog called?", base_version=1)
    client.rollback_agent(BRANCHED, 3)
    _say(client, BRANCHED, "Who am I?")
    client.fork_agent(BRANCHED, "page/ada, as of the branch", version=4)
    client.update_agent("page/ada, as of the branch", is_pinned=True, labels={"team": "<b>kennel</b>"})
    _say(client, HOSTILE, MARKUP)


@contextlib.contextmanager
def endless_turn(front: Front, request_id: str, caller: str = "ada") -> Iterator[threading.Thread]:
    """A turn that runs until it is cancelled; the thread that reads it."""
    sampling = pb.Sampling(max_tokens=7000, logit_bias={_END: -100})

    def read(client: InferenceClient) -> None:
        client.reply(prompt="Once upon a time", agent_id="page/endless", request_id=request_id, sampling=sampling)

    with front.house.client(front.keys[caller]) as client:
        reader = threading.Thread(target=read, args=(client,))
        reader.start()
        try:
            while not any(
                turn.request_id == request_id and turn.state == pb.TURN_STATE_RUNNING for turn in client.list_turns()
            ):
                assert reader.is_alive()
            yield reader
        finally:
            with contextlib.suppress(Exception):
                client.cancel_turn(request_id, timeout_s=20)
            reader.join(30)


def _say(client: InferenceClient, agent_id: str, text: str, base_version: int | None = None) -> None:
    client.reply(
        agent_id=agent_id,
        append_messages=[{"role": "user", "content": text}],
        base_version=base_version,
        sampling=GREEDY,
    )
