"""Two pairings at once, and between them one who hears all, knows one of the codes, and gives anything to anybody."""

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from kvasir.errors import KvasirError

from cachestore_svc.pairing.exchange import Card, Hosting, Invitation, Joining
from cachestore_svc.pairing.identity import Identity, new_identity
from tests.made_models.sampling import sampled

RUNS = sampled(40, of=3000)
CODES = ("ABCD-EFGH", "ZZZZ-ZZZZ")
# The middle is a true party of the second pairing.
NAMES = ("host 0", "joiner 0", "host 1", "joiner 1")
IDENTITIES = {name: new_identity() for name in NAMES}


@dataclass
class Side:
    """One side of one run, and its steps: what it takes, and what it says then."""

    name: str
    steps: Sequence[tuple[str, Callable[[bytes], Any], str]]
    said: dict[str, bytes]  # by what the other side takes it for
    pinned: Card | None = None
    is_over: bool = False


@dataclass
class Middle:
    """Mostly hands on what the partner said; else gives what was ever said, or a bit of it changed."""

    chance: random.Random
    heard: dict[str, list[bytes]] = field(default_factory=lambda: defaultdict(list))

    def hear(self, side: Side) -> None:
        for kind, message in side.said.items():
            self.heard[kind].append(message)

    def choose(self, kind: str, partner: Side) -> bytes | None:
        right = partner.said.get(kind)
        how = self.chance.random()
        if how < 0.88:
            return right
        if how < 0.96 and self.heard[kind]:
            return self.chance.choice(self.heard[kind])
        if right is None:
            return None
        place = self.chance.randrange(len(right))
        return right[:place] + bytes([right[place] ^ 1 << self.chance.randrange(8)]) + right[place + 1 :]


def card(name: str, identity: Identity) -> Card:
    return Card(name.replace(" ", "-"), identity.certificate, "127.0.0.1:1")


def host(number: int, random_bytes: Callable[[int], bytes]) -> Side:
    name = f"host {number}"
    run = Hosting(Invitation(CODES[number], lambda: 0.0), IDENTITIES[name], random_bytes)
    seen: list[Card] = []

    def take_card(message: bytes) -> bytes:
        seen.append(run.take_card(message))
        return run.card(card(name, IDENTITIES[name]))

    def take_signature(message: bytes) -> bytes:
        run.take_signature(message)
        side.pinned = seen[0]
        return run.signature()

    steps = [
        ("joiner's share", run.take_share, ""),
        ("joiner's card", take_card, "host's card"),
        ("joiner's signature", take_signature, "host's signature"),
    ]
    side = Side(name, steps, {"host's share": run.share})
    return side


def joiner(number: int, random_bytes: Callable[[int], bytes]) -> Side:
    name = f"joiner {number}"
    run = Joining(CODES[number], IDENTITIES[name], random_bytes)
    seen: list[Card] = []

    def take_share(message: bytes) -> bytes:
        run.take_share(message)
        return run.card(card(name, IDENTITIES[name]))

    def take_card(message: bytes) -> bytes:
        seen.append(run.take_card(message))
        return run.signature()

    def take_signature(message: bytes) -> None:
        run.take_signature(message)
        side.pinned = seen[0]

    steps = [
        ("host's share", take_share, "joiner's card"),
        ("host's card", take_card, "joiner's signature"),
        ("host's signature", take_signature, ""),
    ]
    side = Side(name, steps, {"joiner's share": run.share})
    return side


def one_run(middle: Middle) -> dict[str, Side]:
    chance = middle.chance
    made = [make(number, chance.randbytes) for make in (host, joiner) for number in (0, 1)]
    sides = {side.name: side for side in made}
    is_crossed = chance.random() < 0.3  # each is brought together with a side of the other pairing
    for _ in range(60):
        side = sides[chance.choice(NAMES)]
        if side.is_over or not side.steps:
            continue
        kind, take, says = side.steps[0]
        partner = sides[partner_of(side.name, is_crossed=is_crossed)]
        if (message := middle.choose(kind, partner)) is None:
            continue
        try:
            answer = take(message)
        except KvasirError:
            side.is_over = True
            continue
        side.steps = side.steps[1:]
        if says:
            side.said[says] = answer
        middle.hear(side)
    return sides


def partner_of(name: str, *, is_crossed: bool = False) -> str:
    kind, number = name.split()
    return f"{'joiner' if kind == 'host' else 'host'} {int(number) ^ is_crossed}"


@pytest.mark.long(3)
@pytest.mark.timeout(3600)
def test_whatever_is_given_to_whom_nobody_pins_anybody_but_the_one_with_the_same_code() -> None:
    middle = Middle(random.Random(1))
    counts: Counter[str] = Counter()
    for run in range(RUNS):
        for side in one_run(middle).values():
            counts["pinned" if side.pinned else "refused" if side.is_over else "waiting"] += 1
            if side.pinned:
                other = partner_of(side.name)
                assert side.pinned == card(other, IDENTITIES[other]), f"run {run}: {side.name}"
    print(f"{RUNS} runs: {dict(counts)}")
    assert min(counts["pinned"], counts["refused"]) > RUNS // 10
