"""The steps before stand-ins: which calls a client repeats, how it follows a turn, and its limits."""

import time
from typing import Any

import pytest

from tests.conformance.expecting import RULES, refusal
from tests.conformance.stand_ins import FlakyEngine, MeasuringEngine, MovingEngine, SharingEngine, served
from tests.conformance.testee import Refused, Testee
from tests.conformance.world import World


def reads_are_asked_again_and_nothing_else_is(program: Testee, world: World) -> None:
    engine = FlakyEngine()
    with served(engine) as address:
        program.call("connect", address=address)
        assert program.call("count", prompt="Hello") == {"tokens": 7}
        assert program.call("get_agent", agent_id="ada")["token_count"] == 9
        assert program.call("usage", agent_id="ada")["agent_count"] == 1
        assert program.call("list_hot_memories", agent_ids=["ada"]) == {"memories": []}
        with refusal("UNAVAILABLE"):
            program.call("fork", source_agent_id="ada", agent_id="eve")
        with refusal("UNAVAILABLE", request_id="mine"):
            program.call("reply", agent_id="ada", prompt="Hello", request_id="mine")
        reads = dict.fromkeys(("CountTokens", "GetAgent", "GetUsage", "ListHotMemories"), 3)
        assert engine.calls == {**reads, "ForkAgent": 1, "Generate": 1}, engine.calls


def a_turn_that_moves_says_where_its_rest_is(program: Testee, world: World) -> None:
    """No reply that was cut is taken for a whole one: neither as a stream nor by `reply`."""
    where = {"request_id": "mine", "peer": MovingEngine.PEER, "resume_token": MovingEngine.TOKEN}
    with served(MovingEngine()) as address:
        program.call("connect", address=address)
        for call in ("reply", "stream"):
            with refusal("UNAVAILABLE", "TURN_MOVED", **where):
                program.call(call, agent_id="ada", prompt="Hello", request_id="mine")
            with refusal("UNAVAILABLE", "STREAM_CUT", request_id="mine"):
                program.call(call, agent_id="cut", prompt="Hello", request_id="mine")
            with refusal("UNAVAILABLE", "STREAM_CUT"):  # the first of two has ended
                program.call(call, prompt="Hello", n=2)
        rest = program.call("stream", resume_token=MovingEngine.TOKEN)
        assert (rest["text"], rest["deltas"], rest["is_finished"], rest["version"]) == ("lo", 1, True, 4), rest
        with refusal("UNAVAILABLE", "STREAM_CUT"):
            program.call("stream", resume_token=MovingEngine.CUT_TOKEN)
        with refusal("NOT_FOUND", "RESUME_TOKEN_UNKNOWN"):
            program.call("stream", resume_token="x")


def a_turn_goes_to_the_engine_that_holds_its_agent(program: Testee, world: World) -> None:
    """Where the caller named the other engines of the store. Once: an engine that is named may have let go since."""
    asked, other, holder = SharingEngine("asked"), SharingEngine("other"), SharingEngine("holder")
    asked.held_by = holder.name
    turn: dict[str, Any] = {"agent_id": "ada", "prompt": "Hello", "request_id": "mine"}
    with served(asked) as address, served(other) as second, served(holder) as third:
        program.call("connect", address=address)
        with refusal("UNAVAILABLE", "AGENT_HELD_ELSEWHERE", request_id="mine", owner="holder"):
            program.call("reply", **turn)
        program.call("connect", address=address, engines=[f"unix:{world.files / 'nobody.sock'}", second, third])
        reply = program.call("reply", timeout_s=20, **turn)
        assert (reply["text"], reply["request_id"]) == ("by holder", "mine"), reply
        assert holder.left_s is not None
        assert holder.left_s <= 20
        assert program.call("stream", **turn)["text"] == "by holder"
        assert (asked.calls["Generate"], other.calls["Generate"], holder.calls["Generate"]) == (3, 0, 2)
        names = [engine.calls["GetCapabilities"] for engine in (asked, other, holder)]
        assert names == [0, 1, 1], "the holder's name is known since the first turn"
        holder.held_by = asked.name
        with refusal("UNAVAILABLE", "AGENT_HELD_ELSEWHERE", request_id="mine", owner="asked"):
            program.call("reply", **turn)
        asked.held_by = "gone"
        with refusal("UNAVAILABLE", "AGENT_HELD_ELSEWHERE", request_id="mine", owner="gone"):
            program.call("reply", **turn)
        holder.held_by = asked.held_by = holder.name
        asked.is_refused_late = True
        before = holder.calls["Generate"]
        with refusal("UNAVAILABLE", "AGENT_HELD_ELSEWHERE", request_id="mine"):
            program.call("stream", **turn)
        assert holder.calls["Generate"] == before, "a reply that has begun is not begun again elsewhere"
        asked.is_refused_late = False
        other.awake.clear()
        program.call("connect", address=address, engines=[second, third])
        began = time.monotonic()
        with pytest.raises(Refused):
            program.call("reply", timeout_s=1, **turn)
        assert time.monotonic() - began < 5, "the turn's deadline holds for the search, too"
        began = time.monotonic()
        assert program.call("reply", timeout_s=20, **turn)["text"] == "by holder"
        assert time.monotonic() - began < 5, "an engine that hangs does not keep the turn from those behind it"
        other.awake.set()


def a_client_has_the_limits_of_every_client(program: Testee, world: World) -> None:
    """Those of proto/client_rules.json."""
    engine, archive = MeasuringEngine(), world.files / "archive"
    archive.write_bytes(bytes(2 * RULES["archive_piece_bytes"] + 1))
    with served(engine) as address:
        program.call("connect", address=address)
        assert program.call("get_agent", agent_id="ada")["version"] == 1
        with refusal("UNAVAILABLE"):
            program.call("usage", agent_id="ada")
        assert program.call("import", agent_id="ada", file=str(archive))["version"] == 1
        assert program.call("reply", prompt=str(RULES["choices"] - 1))["text"] == ""
        cut = program.call("embed", texts=["Hello"], truncate=True)  # a live engine takes long for so long a text
        assert cut == {"model": "cut", "embeddings": []}
        with refusal("INTERNAL"):
            program.call("reply", prompt=str(RULES["choices"]))
    assert engine.attempts == RULES["attempts"]
    limit_s = RULES["round_trip_timeout_s"]
    # gRPC rounds a deadline up, by a hundredth of it at most.
    assert limit_s / 2 < engine.deadline_s <= 1.01 * limit_s, engine.deadline_s
    assert sum(engine.pieces) == archive.stat().st_size
    assert max(engine.pieces) <= RULES["archive_piece_bytes"]
    with served(engine, f"unix:{world.files}/one #2?.sock") as address:  # a path, and no URL
        program.call("connect", address=address)
        assert program.call("get_agent", agent_id="ada")["version"] == 1
    path = "/".ljust(RULES["socket_path_bytes"], "x")
    program.call("connect", address=f"unix:{path}")
    with refusal("INVALID_ARGUMENT", "INVALID_FIELD", "address"):
        program.call("connect", address=f"unix:{path}x")
