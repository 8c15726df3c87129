"""What a fuzzed request is: bytes for an RPC, whose they are, how its caller behaves: a function of seed and number.

So a request can be made again alone, and does not depend on what others did; only its answer may.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from google.protobuf.message import Message

from tests.campaigns.fuzz.contract import Rpc
from tests.campaigns.fuzz.mutations import Known, fill, mutate
from tests.campaigns.fuzz.wire import break_texts, damage
from tools.kvasir_tiny.words import Dice

_ODD_AUTHORIZATIONS = ("", "Bearer ", "bearer x", "Basic eDp4", "Bearer " + "x" * 600, "Bearer a b")
# Files are what strangers can build most into: they are sent more often than their RPCs are a part of all.
_SCENARIO_OF_RPC, _SCENARIO = 0.7, 0.2


@dataclass(frozen=True)
class Call:
    """One call, as bytes."""

    rpc: Rpc
    messages: tuple[bytes, ...]
    authorization: str | None
    timeout_s: float
    # The caller goes away after so long, or after so many answers.
    cancel_after_s: float | None = None
    takes: int | None = None
    # It never says that it has sent all.
    is_left_open: bool = False
    # The calls behind it are made while it runs.
    is_beside: bool = False

    def __str__(self) -> str:
        shown = [message[:160].hex() + ("…" if len(message) > 160 else "") for message in self.messages[:4]]
        return (
            f"{self.rpc.path} messages={len(self.messages)} bytes={sum(map(len, self.messages))} "
            f"timeout_s={self.timeout_s:.3f} cancel_after_s={self.cancel_after_s} takes={self.takes} "
            f"is_left_open={self.is_left_open} authorization={str(self.authorization)[:20]!r} hex={shown}"
        )


class Step(NamedTuple):
    """One call of a scenario, before it is known how its caller behaves."""

    rpc: Rpc
    messages: Sequence[bytes]
    is_beside: bool = False


# Makes the requests of one RPC, which may be more than one call: what is written first is committed next.
Scenario = Callable[[Dice], Sequence[Step]]


@dataclass(frozen=True)
class Requests:
    """All requests of one service: by its descriptors, and by scenarios of what no descriptor knows."""

    rpcs: Mapping[str, Rpc]
    known: Known
    tokens: Mapping[str, str]
    scenarios: Mapping[str, Scenario]
    usual_token: str
    usual_timeout_s: float = 10.0
    # Of RPCs that another caller usually makes.
    tokens_of: Mapping[str, str] = field(default_factory=dict)
    # What ends everybody's turns is asked for seldom.
    seldom: frozenset[str] = frozenset()

    def of(self, seed: int, number: int) -> Sequence[Call]:
        """The calls of one request, in their order."""
        dice = Dice(f"fuzz {seed} {number}")
        name = sorted(self.rpcs)[number % len(self.rpcs)]
        if name in self.seldom and dice.chance(0.8):
            name = dice.pick(sorted(set(self.rpcs) - self.seldom))
        related = [scenario for label, scenario in self.scenarios.items() if label.split()[0] == name]
        if dice.chance(_SCENARIO_OF_RPC if related else _SCENARIO):
            made = dice.pick(related or list(self.scenarios.values()))(dice)
        else:
            made = [Step(self.rpcs[name], [self.message(self.rpcs[name], dice)])]
        return [self._called(step, dice) for step in made]

    def message(self, rpc: Rpc, dice: Dice) -> bytes:
        """One request message: sometimes valid, mostly mutated, sometimes no message at all."""
        message = fill(rpc.request_type(), dice, self.known)
        return self.broken(message, dice)

    def broken(self, message: Message, dice: Dice) -> bytes:
        """A message's bytes, after mutations of its fields, its bytes, both or neither."""
        how = dice.random()
        if how > 0.2:
            for _ in range(dice.pick([1, 1, 1, 2, 3]) if how < 0.9 else 0):
                mutate(message, dice, self.known)
        data = break_texts(message.SerializeToString(deterministic=True), dice)
        return damage(data, dice) if how > 0.8 else data

    def _called(self, step: Step, dice: Dice) -> Call:
        # A stream that has no end of its own ends by its deadline.
        rpc, messages = step.rpc, step.messages
        token = self.tokens[self.tokens_of.get(rpc.name, self.usual_token)]
        call = Call(rpc, tuple(messages), f"Bearer {token}", self.usual_timeout_s, is_beside=step.is_beside)
        if rpc.name.startswith("Watch"):
            call = replace(call, timeout_s=0.02 + 0.2 * dice.random())
        if dice.chance(0.15):
            name = dice.pick([*sorted(self.tokens), ""])
            odd = dice.pick(_ODD_AUTHORIZATIONS) if dice.chance(0.2) else None
            call = replace(call, authorization=odd if odd is not None or not name else f"Bearer {self.tokens[name]}")
        behaviour = dice.below(40)
        if behaviour == 0:
            call = replace(call, timeout_s=dice.pick([0.0, 0.001, 0.01, 0.05]))
        elif behaviour == 1:
            call = replace(call, cancel_after_s=dice.pick([0.0, 0.001, 0.005, 0.02, 0.1]))
        elif behaviour == 2:
            call = replace(call, takes=dice.below(3))
        elif behaviour == 3:
            call = replace(call, is_left_open=True, timeout_s=0.1)
        elif behaviour == 4:
            call = replace(call, messages=() if dice.chance(0.5) else (*call.messages, *call.messages))
        elif behaviour == 5 and len(messages) > 1:
            call = replace(call, messages=tuple(messages[: dice.below(len(messages))]), is_left_open=dice.chance(0.3))
            call = replace(call, timeout_s=0.2) if call.is_left_open else call
        return call
