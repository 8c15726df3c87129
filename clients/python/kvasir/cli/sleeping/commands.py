"""`kvasir agents sleep | wake`."""

import time

from kvasir.cli.agents import AgentArgument
from kvasir.cli.caller import Caller
from kvasir.cli.engine import engine_client
from kvasir.cli.rows import fields_of, size
from kvasir.errors import NotFound
from kvasir.inference.v1 import inference_pb2


def sleep(caller: Caller, agent: AgentArgument) -> None:
    """Drop an agent's KV and keep its tokens, about a thousandth of the bytes. Its next turn computes the KV again, bit
    for bit. The engine first proves that on this machine; if it cannot, it changes nothing (exit code 1). It removes
    older versions, too."""
    with engine_client(caller) as client:
        slept = client.sleep(agent)
    wake_s = slept.wake.ToMilliseconds() / 1e3
    value = {"agent_id": agent, **fields_of(slept, "version", "tokens", "kept_bytes", "freed_bytes")}
    text = f"{agent} is asleep: {size(slept.freed_bytes)} are let go, {size(slept.kept_bytes)} stay. "
    text += f"Its next turn begins about {wake_s:.1f} s later."
    caller.result(value | {"wake_ms": round(1e3 * wake_s)}, text)


def wake(caller: Caller, agent: AgentArgument) -> None:
    """Make an agent's KV hot before its next turn: read it from the store, or compute it if the agent is asleep."""
    began = time.monotonic()
    with engine_client(caller) as client:
        warmed = client.warm(agent_id=agent)
    if not warmed.tokens and warmed.miss == inference_pb2.MISS_REASON_NEW_AGENT:
        raise NotFound(f"agent {agent!r} remembers nothing", reason="AGENT_NOT_FOUND", metadata={"agent_id": agent})
    seconds = time.monotonic() - began
    value = {"agent_id": agent, **fields_of(warmed, "version", "tokens"), "seconds": seconds}
    caller.result(value, f"{agent} is hot: {warmed.tokens} tokens, after {seconds:.1f} s.")
