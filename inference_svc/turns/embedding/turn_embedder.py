"""The loaded model's embeddings: each text is a turn without memory, in cells beside all other turns."""

import asyncio
from collections.abc import Sequence

from kvasir.errors import InvalidArgument

from inference_svc.engine.api import Ended, Event, Pace, Prefilled, Priority, SamplingParams, TurnPlan
from inference_svc.engine.engine import Engine, check_fits
from inference_svc.memory.service_stats import ServiceStats
from inference_svc.model.embedding.pooling import Embedded, Pooling
from inference_svc.model.prompting import Prompting
from inference_svc.text.token_ids import TokenChars, TokenIds
from inference_svc.turns.admission import Admission
from inference_svc.turns.turn_reporter import HandOff, run_to_end


class TurnEmbedder:
    def __init__(
        self, engine: Engine, prompting: Prompting, pooling: Pooling, admission: Admission, stats: ServiceStats
    ) -> None:
        self._engine = engine
        self._prompting = prompting
        self._pooling = pooling
        self._admission = admission
        self._stats = stats
        self._handoff = HandOff(asyncio.get_running_loop())
        self._open: set[asyncio.Future[None]] = set()

    @property
    def name(self) -> str:
        return self._engine.model.name

    @property
    def dimensions(self) -> int:
        return self._engine.model.embedding_width

    @property
    def is_idle(self) -> bool:
        return not self._open

    async def embed(
        self, namespace: str, given: str | Sequence[int], field: str, *, truncate: bool, priority: Priority
    ) -> Embedded:
        """One text's embedding; a cancel ends it before its next cell. Raises FailedPrecondition (NO_EMBEDDINGS)."""
        ids = await self._ids(namespace, given, field, truncate=truncate)
        plan = TurnPlan(
            ids,
            TokenChars((0,) * len(ids)),
            SamplingParams(max_tokens=0),
            pace=Pace(priority),
            namespace=namespace,
            pooling=self._pooling,
        )
        with self._admission.kv(namespace, self._engine.needed_bytes(plan.most_tokens)):
            found = await self._run(namespace, plan)
        return Embedded(found.embedding, len(ids))

    async def drain(self, patience_s: float) -> None:
        """Wait for the texts under way; closing the engine ends those that take longer."""
        if self._open:
            await asyncio.wait(set(self._open), timeout=patience_s)

    async def _ids(self, namespace: str, given: str | Sequence[int], field: str, *, truncate: bool) -> TokenIds:
        """What spells a special token is text. Only those stand around it that the tokenizer puts there itself."""
        context = self._engine.model.context_tokens
        if isinstance(given, str):
            if truncate:
                given = self._prompting.beginning(given, context)
            else:
                fewest = self._prompting.fewest_tokens(given)
                check_fits(fewest, 0, self._engine.model.context_tokens, field=field, is_lower_bound=True)
            twin = await self._prompting.twin(namespace)
            before, ids, behind = await twin.run(namespace, lambda: twin.framed(given))
        else:
            before, ids, behind = [], list(given), []
        if truncate:
            ids = ids[: context - len(before) - len(behind)]
        found = TokenIds([*before, *ids, *behind])
        if not ids or found.largest >= self._engine.vocabulary_size:
            most = self._engine.vocabulary_size
            raise InvalidArgument.of(field, f"expected one token or more, all below {most}")
        check_fits(len(found), 0, self._engine.model.context_tokens, field=field)
        return found

    async def _run(self, namespace: str, plan: TurnPlan) -> Ended:
        counters, computed = self._stats.of(namespace), 0

        def count(event: Event) -> None:
            nonlocal computed
            if isinstance(event, Prefilled):
                counters.tokens["prefilled"] += event.tokens_done - computed
                computed = event.tokens_done

        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._open.add(over)
        try:
            return await run_to_end(self._engine, plan, self._handoff, count)
        finally:
            self._open.discard(over)
            over.cancel()
