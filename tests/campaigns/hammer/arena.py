"""What the agents of a round share: the house, the reference, and the account of what was asked and found."""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvasir.cachestore.v1 import manifest_pb2
from kvasir.clients import AioInferenceClient, AioStoreClient
from kvasir.errors import InvalidArgument, NotFound
from kvasir.formats import manifest as manifests

from tests.campaigns.hammer.canaries import Canaries
from tests.campaigns.hammer.records import Alone, Problem, TurnRecord, difference, reuse_problem
from tests.campaigns.hammer.reference import Reference
from tests.running.system_fixtures import House

if TYPE_CHECKING:
    from tests.campaigns.hammer.actors import Actor

# On machines whose kernels sum a single row in another order than a cell of rows, decoded tokens differ from prefilled
# ones in the last bits of K and V. Now and then such a value lies at the edge of a code, and the code turns. Later rows
# attend to it, so codes of theirs turn too, more from layer to layer. Measured on kvasir-tiny: one code that is turned
# by hand in the first block changes 0.01 to 0.7 % of the bytes of a later file, 8 or 64 codes up to 3.8 %. Two memories
# in ten thousand requests had 2.4 %. A wrong token changes 7 to 18 % of a file, one of the last twenty 2 to 6 %, and a
# row too many 80 to 90 %. So this does not see a wrong token at the very end of a memory; that a memory is the one left
# alone is compared to the bit.
_UNLIKE_AT_MOST = 0.05


@dataclass(frozen=True)
class RoundPlan:
    """What decides a round. The same plan asks the same; who meets whom in the engine is for the machine to decide."""

    seed: int
    number: int
    requests: int = 250
    concurrency: int = 32
    # Of the engine's lives, in turn. Where there is little, memories come and go; where there is much, batches keep a
    # decoded copy of their rows.
    memory_gib: tuple[float, ...] = (0.25, 0.014)
    kills: int = 1
    stops: int = 1

    @property
    def name(self) -> str:
        return f"{self.seed}/{self.number}"


@dataclass
class RoundResult:
    """What a round saw."""

    plan: RoundPlan
    requests: int = 0
    compared: int = 0
    seconds: float = 0.0
    unlike_prefilled: list[float] = field(default_factory=list)  # by agent: the part of the bytes of its memory
    counts: Counter[str] = field(default_factory=Counter)
    problems: list[Problem] = field(default_factory=list)


class Arena:
    """One round's shared parts."""

    def __init__(self, plan: RoundPlan, house: House, reference: Reference) -> None:
        self.plan = plan
        self.house = house
        self.reference = reference
        self.result = RoundResult(plan)
        self.canaries = Canaries(plan.name)
        self.client = AioInferenceClient.connect(house.engine.address)
        self.store = AioStoreClient.connect(house.store.address)
        self.engine_is_up = asyncio.Event()
        self.engine_is_up.set()
        self.lives_of_engine = 1
        self.forked: list[Actor] = []
        self._asked: tuple[int, asyncio.Event] | None = None
        self._names = itertools.count()
        self._comparisons: set[asyncio.Task[None]] = set()
        self._histories: dict[str, list[TurnRecord]] = {}
        self._tainted: set[str] = set()

    @property
    def counts(self) -> Counter[str]:
        return self.result.counts

    @property
    def is_over(self) -> bool:
        return self.result.requests >= self.plan.requests

    def began_request(self) -> int:
        """The number of the next request."""
        self.result.requests += 1
        if self._asked is not None and self.result.requests >= self._asked[0]:
            self._asked[1].set()
        return self.result.requests

    async def until_asked(self, requests: int) -> None:
        """Wait until so many requests were asked."""
        self._asked = (requests, asyncio.Event())
        if self.result.requests < requests:
            await self._asked[1].wait()

    def new_name(self) -> str:
        return f"a{next(self._names)}"

    def now_s(self) -> float:
        return time.monotonic()

    def check(self, record: TurnRecord) -> None:
        """Compare a turn with the same alone, when the reference comes to it. In the order of the agent's turns."""
        self._histories.setdefault(record.agent, []).append(record)
        task = asyncio.create_task(self._compare(record, self.reference.alone(record)))
        self._comparisons.add(task)
        task.add_done_callback(self._comparisons.discard)

    def check_stored(self, record: TurnRecord, stored: manifest_pb2.Manifest) -> None:
        """Compare what the store holds of an agent, to the bit, with what the same turns leave alone."""
        held = [*stored.blocks, *([stored.tail] if stored.HasField("tail") else [])]
        task = asyncio.create_task(
            self._compare_stored(record, [blob.hash for blob in held], self.reference.blobs(record.agent))
        )
        self._comparisons.add(task)
        task.add_done_callback(self._comparisons.discard)

    def problem(self, sort: str, record: TurnRecord, what: str, alone: Alone | None = None) -> None:
        root = record.agent.partition("-")[0]
        if root in self._tainted:
            return
        self._tainted.add(root)
        history = [each.to_json() for each in self._histories.get(record.agent, ())]
        self.result.problems.append(
            Problem(sort, record.agent, what, record.to_json(), vars(alone) if alone else {}, history)
        )

    async def _compare_stored(
        self, record: TurnRecord, held: list[str], waiting: Awaitable[tuple[list[str], float]]
    ) -> None:
        alone, unlike_prefilled = await waiting
        self.counts["memories compared to the bit"] += 1
        self.result.unlike_prefilled.append(unlike_prefilled)
        if held != alone:
            differing = [index for index, pair in enumerate(zip(held, alone, strict=False)) if len(set(pair)) > 1]
            self.problem("bits", record, f"stored blobs {differing} of {len(held)} are not those left alone")
        if unlike_prefilled > _UNLIKE_AT_MOST:
            what = f"{unlike_prefilled:.0%} of a blob are not what the same tokens prefilled at once give"
            self.problem("bits", record, what)

    async def settle(self) -> None:
        """Wait until every turn has been compared, and look into the store."""
        while self._comparisons:
            await asyncio.wait(self._comparisons)
        await self._check_store()

    async def _compare(self, record: TurnRecord, waiting: Awaitable[Alone]) -> None:
        try:
            alone = await waiting
        except RuntimeError as error:
            self.problem("reference", record, str(error))
            return
        self.result.compared += 1
        what = difference(record, alone)
        if what:
            self.problem("mismatch", record, what, alone)
        elif wrong := reuse_problem(record, alone):
            self.problem("cached", record, wrong, alone)
        if leaked := self.canaries.foreign(record.agent, record.text):
            # Words drawn by chance may be anything, also what somebody was told: the same alone, they are chance.
            if what or not record.sampling.get("temperature"):
                self.problem("canary", record, f"words of others: {sorted(leaked)}", alone)
            else:
                self.counts["coincidence"] += 1

    async def _check_store(self) -> None:
        """No stored memory holds a word that only others were told, unless the agent drew that word by chance."""
        for agent, history in self._histories.items():
            try:
                _, data = await self.store.get_snapshot(agent)
            except (NotFound, InvalidArgument):
                continue  # nobody, or an agent of which nothing was kept
            self.counts["memories read back"] += 1
            said = {word for turn in history for word in self.canaries.foreign(agent, turn.text)}
            if leaked := self.canaries.foreign(agent, manifests.parse(data).text) - said:
                self.problem("canary", TurnRecord(agent, -1), f"in its stored memory: {sorted(leaked)}")
