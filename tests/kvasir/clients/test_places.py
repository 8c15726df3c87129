"""The header by which a load balancer keeps an agent's calls at one engine."""

from concurrent import futures
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
from kvasir.clients import InferenceClient
from kvasir.clients.inference_client_turns import PLACE_KEY, place_of
from kvasir.errors import KvasirError


class _Listening(grpc.ServerInterceptor):
    """Notes each call's place. Nobody serves the call."""

    def __init__(self) -> None:
        self.places: list[str] = []

    def intercept_service(self, continuation: Any, details: Any) -> Any:
        self.places.append(str(dict(details.invocation_metadata).get(PLACE_KEY, "")))
        return continuation(details)


def test_each_call_about_an_agent_has_its_place_and_a_fork_that_of_its_source(tmp_path: Path) -> None:
    """The engine that has it hot may know a turn that is not stored yet: another one would copy an older memory."""
    listening = _Listening()
    server = grpc.server(futures.ThreadPoolExecutor(1), interceptors=[listening])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with InferenceClient.connect(f"127.0.0.1:{port}") as client:
            for call in (
                lambda: client.reply(agent_id="ada", prompt="x"),
                lambda: client.warm(agent_id="ada"),
                lambda: client.fork_agent("ada", "bob"),
                lambda: client.rollback_agent("ada", 1),
                lambda: client.delete_agent("ada"),
                lambda: client.export_to_file("ada", tmp_path / "ada.kvasir"),
                client.list_models,
                lambda: client.reply(prompt="x"),
            ):
                with suppress(KvasirError):
                    call()
    finally:
        server.stop(None)
    [(_, place)] = place_of("ada")
    assert listening.places == [place] * 6 + [""] * 2
