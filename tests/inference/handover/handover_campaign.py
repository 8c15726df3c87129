"""Hand-overs at random tokens, of every kind of turn, and the same while engines are killed, frozen and cut off.

What a reader hears is compared with what it hears of the same turn that never moves. `Findings` says how often a turn
moved, what differed, and how long readers waited.

    python -m tests.inference.handover.handover_campaign --moves 300 --broken 40
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvasir.clients import AioInferenceClient
from kvasir.errors import KvasirError

from tests.inference.handover.cases import CASES, ON, STORY
from tests.inference.handover.two_engines import TwoEngines, hear, two_engines

_SHORT = STORY[:200]
TURNS: dict[str, dict[str, Any]] = {
    **CASES,
    # Most have few blocks to bring: so more moves fit in a minute.
    **{f"short {name}": {**case, "prompt": _SHORT} for name, case in CASES.items() if "prompt" in case},
    "short sampled again": {"prompt": _SHORT, "sampling": {**ON, "temperature": 1.3, "seed": 77, "max_tokens": 150}},
    # Much of it is held back, because a stop string may have begun: one never ends, the other near the reply's end.
    "stop": {"prompt": STORY, "sampling": {**ON, "temperature": 1.0, "seed": 11, "stop": ["the boat too", ". Ben w"]}},
    "several": {"prompt": STORY, "sampling": {**ON, "temperature": 1.0, "seed": 21, "n": 3}},
    "agent": {"prompt": _SHORT, "agent_id": "", "sampling": {**ON, "temperature": 0.7, "seed": 8}},
}
_TOLD_EVERY, _LOG = 10, 20_000
DISTURBANCES = ("cut", "kill source", "kill destination", "freeze destination")


@dataclass
class Findings:
    """What a campaign found."""

    moves: int = 0
    ended_before: int = 0  # turns that were over when they were asked to move
    problems: list[str] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)  # of disturbed turns

    def summary(self) -> str:
        gaps = sorted(self.gaps_s) or [0.0]
        return (
            f"{self.moves} moves ({self.ended_before} turns had ended before), {len(self.problems)} problems; gap at "
            f"the reader: median {gaps[len(gaps) // 2] * 1e3:.0f} ms, longest {gaps[-1] * 1e3:.0f} ms; disturbed: "
            f"{dict(self.ends)}"
        )


@dataclass
class Campaign:
    """Moves turns between two engines, and checks what is heard."""

    two: TwoEngines
    dice: random.Random
    findings: Findings = field(default_factory=Findings)
    _stayed: dict[str, tuple[object, ...]] = field(default_factory=dict)
    _tokens: dict[str, int] = field(default_factory=dict)
    _agents: int = 0

    async def moves(self, count: int) -> None:
        """So many moves of turns that nothing else disturbs."""
        async with self.two.clients() as (a, b):
            while self.findings.moves < count and len(self.findings.problems) < 5:
                await self._one(*self.dice.choice([(a, b, "b"), (b, a, "a")]))

    async def _one(self, source: AioInferenceClient, other: AioInferenceClient, peer: str) -> None:
        name = self.dice.choices(list(TURNS), [4 if each.startswith("short") else 1 for each in TURNS])[0]
        turn = self._turn(name)
        if name not in self._stayed:
            stayed = await hear(other, **self._turn(name))
            self._stayed[name] = stayed.told
            self._tokens[name] = sum(len(each.token_ids) for each in stayed.reply.choices)
        at = self.dice.randrange(1, max(self._tokens[name] - 8, 2))
        heard = await hear(source, {at: (source, peer)}, **turn)
        self.findings.moves += len(heard.moves)
        self.findings.ended_before += not heard.moves
        self.findings.gaps_s += heard.gaps_s
        if heard.told != self._stayed[name]:
            self.findings.problems.append(f"{name} at {at}: heard another reply")

    async def disturbed(self, how: str) -> None:
        """A move in whose midst something breaks: whoever asks again hears the same text, from one history."""
        source, destination = self.two.a, self.two.b
        turn = self._turn("agent")
        async with self.two.clients() as (a, b):
            a.peers["cut"] = b
            whole = (await hear(b, **self._turn("agent"))).reply.text
            breaking = asyncio.create_task(self._break(how))
            try:
                heard = await hear(a, {self.dice.randrange(1, 20): (a, "cut" if how == "cut" else "b")}, **turn)
                end = "moved" if heard.moves else "stayed"
                if heard.reply.text != whole:
                    self.findings.problems.append(f"{how}: heard another reply")
            except KvasirError as error:
                end = error.reason
            await breaking
        for service in (source, destination):
            if not service.is_running:
                await asyncio.to_thread(service.start)
        async with self.two.clients() as (a, b):
            for engine in (b, a):
                text, versions = await asked_again(engine, turn)
                if (text, versions) != (whole, [1]):
                    self.findings.problems.append(f"{how}, {end}: asked again, {versions}, the same: {text == whole}")
        self.findings.ends[f"{how}: {end}"] += 1

    async def _break(self, how: str) -> None:
        """Break something at a random moment of the next move."""
        if how == "cut":
            self.two.link.cut_after(self.dice.randrange(40_000))
            return
        await asyncio.sleep(self.dice.uniform(0.0, 0.4))
        if how == "kill source":
            self.two.a.kill()
        elif how == "kill destination":
            self.two.b.kill()
        else:
            self.two.b.freeze()
            await asyncio.sleep(8.0)
            self.two.b.thaw()

    def _turn(self, name: str) -> dict[str, Any]:
        if name != "agent":
            return TURNS[name]
        self._agents += 1
        agent = f"campaign {self._agents} {self.dice.random()}"
        return {**TURNS[name], "agent_id": agent, "request_id": agent}


async def asked_again(engine: AioInferenceClient, turn: dict[str, Any]) -> tuple[str, list[int]]:
    """What a retry hears, and the agent's versions then."""
    for _ in range(60):
        try:
            text = (await hear(engine, **turn)).reply.text
            return text, [line.version for line in (await engine.get_agent(turn["agent_id"])).lines]
        except KvasirError:  # a lease of the dead ends by itself
            await asyncio.sleep(0.5)
    return "", []


def main() -> int:
    """Moves first, then moves in whose midst something breaks; 1 if a reader heard what it should not, 2 if time was
    over before all was played.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moves", type=int, default=300)
    parser.add_argument("--broken", type=int, default=40)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--time-limit-s", type=float, default=7200, help="no further move begins after it")
    given = parser.parse_args()
    give_up = time.monotonic() + given.time_limit_s
    with tempfile.TemporaryDirectory(prefix="kv") as root, two_engines(Path(root)) as two:
        campaign = Campaign(two, random.Random(given.seed))
        findings = campaign.findings
        while findings.moves < given.moves and not findings.problems and time.monotonic() < give_up:
            asyncio.run(campaign.moves(min(findings.moves + _TOLD_EVERY, given.moves)))
            print(f"seed {given.seed}: {findings.summary()}", flush=True)
        broken = 0
        for number in range(given.broken):
            if findings.problems or time.monotonic() > give_up:
                break
            broken += 1
            asyncio.run(campaign.disturbed(DISTURBANCES[number % len(DISTURBANCES)]))
        print(f"seed {given.seed}, at the end: {findings.summary()}")
        if findings.problems:
            print(*findings.problems, two.a.log[-_LOG:], two.b.log[-_LOG:], two.house.store.log[-_LOG:], sep="\n")
    if findings.problems:
        return 1
    return 0 if findings.moves >= given.moves and broken == given.broken else 2


if __name__ == "__main__":
    sys.exit(main())
