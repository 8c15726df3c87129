"""The reference's process: one engine, one turn at a time. Lines of JSON in, lines of JSON out; see `reference.py`."""

import json
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from kvasir.cachestore.v1 import manifest_pb2
from kvasir.formats.digest import Digest

from inference_svc.engine.api import AgentKey, Cold, Ended, Event, Failed, Hot, SamplingParams, Tokens, TurnPlan
from inference_svc.engine.engine import Engine
from inference_svc.engine.scheduling.schedulable import DraftRules
from inference_svc.model import kvasir_tiny
from inference_svc.model.prompting import Prompting, Tokenized
from inference_svc.text.conversation import dialogue, render
from inference_svc.text.given_json import GivenJson
from inference_svc.text.prefix_matching import NO_MATCH, NO_TEXT, RememberedText, match_prefix
from inference_svc.text.token_ids import NO_CHARS, NO_TOKENS, TokenChars, TokenIds
from tests.campaigns.hammer.records import Alone, TurnRecord

_MEMORY_BYTES = 4 << 30
_FORCED = 1000.0  # a bias that no logit outweighs


class AloneEngine:
    """Does turns alone and remembers what every agent remembers, now and before its last turn."""

    def __init__(self, model: str, cache_dir: Path) -> None:
        self._engine = Engine.open(
            model or kvasir_tiny.path(),
            cache_dir=cache_dir,
            memory_budget_bytes=_MEMORY_BYTES,
            drafts=DraftRules(most=0),
        )
        self._prompting = Prompting(self._engine.tokenizer, self._engine.token_text)
        self._transcripts: dict[str, RememberedText] = {}

    def obey(self, order: dict[str, Any]) -> dict[str, Any]:
        match order:
            case {"op": "turn", "record": fields}:
                return vars(self._turn(TurnRecord(**fields)))
            case {"op": "blobs", "agent": agent}:
                files = self._files(agent)
                unlike = _difference(files, self._prefilled(agent)) if files else 0.0
                return {"blobs": [Digest.of(data).hash for data in files], "unlike": unlike}
            case {"op": "fork", "source": source, "target": target}:
                self._copy(source, target)
            case {"op": "undo", "agent": agent}:
                self._copy(_before(agent), agent)
            case {"op": "forget", "agent": agent}:
                self._forget(agent)
                self._forget(_before(agent))
        return {}

    def close(self) -> None:
        self._prompting.close()
        self._engine.close()

    def _turn(self, record: TurnRecord) -> Alone:
        text = record.prompt if record.prompt is not None else self._rendered(record.messages or [])
        kept, tokens = self._matched(self._transcripts.get(record.agent, NO_TEXT), text)
        if record.source == "SHARED":
            tokens = self._prompting.tokenize(text)
        hot = self._engine.memories.get(_key(record.agent)) if record.agent else None
        expected = min(kept, len(tokens.ids) - 1, kept if hot is None else len(hot.state.computed.token_ids))
        ended, told = self._run(
            TurnPlan(
                token_ids=tokens.ids,
                token_chars=tokens.chars,
                sampling=_sampling(record),
                reuse=_reuse(record, expected),
                key=self._key_of(record),
            )
        )
        if record.agent and record.is_remembered:
            state = ended.state
            self._transcripts[record.agent] = RememberedText(
                text + ended.generated_text, state.token_ids, state.token_chars
            )
        return Alone(
            tokens=told,
            kept=list(ended.state.token_ids[len(tokens.ids) :]),
            text=ended.text,
            prompt_tokens=len(tokens.ids),
            expected_cached=expected,
        )

    def _key_of(self, record: TurnRecord) -> AgentKey | None:
        """Whose memory the turn extends: the agent's, or a copy that nobody uses again."""
        if not record.agent:
            return None
        aside = _before(record.agent) if record.is_remembered else _cut(record.agent)
        self._copy(record.agent, aside)
        return _key(record.agent if record.is_remembered else aside)

    def _run(self, plan: TurnPlan) -> tuple[Ended, list[int]]:
        over = threading.Event()
        events: list[Event] = []

        def on_events(new: list[Event]) -> None:
            events.extend(new)
            if isinstance(new[-1], Ended | Failed):
                over.set()

        self._engine.submit(plan, on_events)
        assert over.wait(300)
        last = events[-1]
        if isinstance(last, Failed):
            raise last.error
        assert isinstance(last, Ended)
        return last, [token for event in events if isinstance(event, Tokens) for token in event.ids]

    def _files(self, agent: str) -> list[bytes]:
        """The tensor files of the agent's memory."""
        snapshot = self._engine.memories.snapshot(_key(agent), 0).result(60)
        if snapshot is None:
            return []
        return [data for _, data in (*snapshot.blocks, *([snapshot.tail] if snapshot.tail else []))]

    def _prefilled(self, agent: str) -> list[bytes]:
        """Those of the same tokens prefilled at once, but for the last, which is generated."""
        *prompt, last = self._transcripts[agent].token_ids
        plan = TurnPlan(
            token_ids=TokenIds(prompt),
            token_chars=TokenChars((1,) * len(prompt)),
            sampling=SamplingParams(max_tokens=1, logit_bias=((last, _FORCED),)),
            key=_key(_anew(agent)),
        )
        ended, _ = self._run(plan)
        assert tuple(ended.state.token_ids) == (*prompt, last)
        files = self._files(_anew(agent))
        self._forget(_anew(agent))
        return files

    def _rendered(self, messages: list[dict[str, str]]) -> str:
        given = [manifest_pb2.Message(**each) for each in messages]
        return render(self._prompting.template, dialogue(given, (), GivenJson(), self._prompting.specials))

    def _matched(self, memory: RememberedText, text: str) -> tuple[int, Tokenized]:
        """How many of the memory's tokens the text keeps, and the text's tokens with those as they were."""
        match = NO_MATCH
        if memory.token_ids:
            match = match_prefix(memory, text, ends_whole=self._prompting.ends_whole)
        kept, rest = match.kept_tokens, text[match.kept_chars :]
        suffix = self._prompting.tokenize(rest) if rest else Tokenized(NO_TOKENS, NO_CHARS)
        return kept, Tokenized(memory.token_ids[:kept], memory.token_chars[:kept]) + suffix

    def _copy(self, source: str, target: str) -> None:
        self._forget(target)
        if source in self._transcripts:
            self._transcripts[target] = self._transcripts[source]
            assert self._engine.memories.fork(_key(source), _key(target)).result(60)

    def _forget(self, agent: str) -> None:
        self._transcripts.pop(agent, None)
        self._engine.memories.drop(_key(agent)).result(60)


def _reuse(record: TurnRecord, expected: int) -> Cold | Hot:
    if record.cached_tokens is None or record.source == "REPLAY":
        return Hot(expected) if expected > 0 else Cold()
    # More is what a cut turn has computed behind the memory: the rows that are computed here.
    own = min(record.cached_tokens, expected) if record.source in ("HOT", "WARM") else 0
    return Hot(own) if own else Cold()


def _difference(files: list[bytes], others: list[bytes]) -> float:
    """The part of the bytes that differs, of the file of which it is largest."""
    pairs = [
        (np.frombuffer(one, np.uint8), np.frombuffer(other, np.uint8)) for one, other in zip(files, others, strict=True)
    ]
    return max(float((one != other).mean()) if one.size == other.size else 1.0 for one, other in pairs)


def _before(agent: str) -> str:
    return f"{agent} before its last turn"


def _cut(agent: str) -> str:
    return f"{agent} in a turn that was cut"


def _anew(agent: str) -> str:
    return f"{agent} from its beginning"


def _key(agent: str) -> AgentKey:
    return AgentKey("alone", agent)


def _sampling(record: TurnRecord) -> SamplingParams:
    given = {**record.sampling, "stop": tuple(record.sampling.get("stop", ()))}
    bias = given.pop("logit_bias", {})
    params = SamplingParams(**given, logit_bias=tuple((int(token), added) for token, added in bias.items()))
    if record.limit_tokens is None:
        return params
    return replace(params, max_tokens=max(min(record.limit_tokens, params.max_tokens), 1))


def main() -> None:
    with tempfile.TemporaryDirectory() as cache_dir:
        alone = AloneEngine(sys.argv[1] if len(sys.argv) > 1 else "", Path(cache_dir))
        for line in sys.stdin:
            try:
                answer = alone.obey(json.loads(line))
            except Exception as error:  # noqa: BLE001 - the caller is told
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), flush=True)
        alone.close()


if __name__ == "__main__":
    main()
