"""The engine under fuzz, with its store: what its requests may name, and memories that a store may come to hold."""

import contextlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvasir.cachestore.v1 import cachestore_pb2 as store_pb
from kvasir.clients import InferenceClient, message
from kvasir.credentials import ADMIN, CLIENT, ENGINE, Principal
from kvasir.errors import FailedPrecondition, Unavailable
from kvasir.formats.digest import Digest
from kvasir.inference.v1 import inference_pb2 as pb

from tests.campaigns.fuzz import files
from tests.campaigns.fuzz.calling import sending
from tests.campaigns.fuzz.calls import Requests, Scenario, Step
from tests.campaigns.fuzz.campaign import Send
from tests.campaigns.fuzz.contract import Rpc, engine_rpcs, store_rpcs
from tests.campaigns.fuzz.mutations import Known
from tests.inference.engine.tiny_models import LLAMA, write_model
from tests.running.guarded_house import guarded
from tests.running.system_fixtures import ENGINE_SERVICE, STORE_SERVICE, House
from tools.kvasir_tiny.words import Dice

_EVERYTHING = frozenset({ENGINE, CLIENT, ADMIN})
_PRINCIPALS = (
    Principal("all", "default", _EVERYTHING),
    Principal("client", "default", frozenset({CLIENT})),
    Principal("foreign", "elsewhere", _EVERYTHING),
    Principal("steady", "steady", _EVERYTHING),
)
_PROMPT = "We met at the market this morning, and somebody gave the rest away. " * 20
_ASKED = {"max_tokens": 2, "temperature": 0.0}
_LOADED_WITHIN_S = 60.0


class EngineTarget:
    """A running engine and its store, with one remembered conversation that no fuzzed request can name."""

    def __init__(self, directory: Path, seed: int) -> None:
        model = write_model(directory / "models" / "one", LLAMA)
        self._house = House(directory / "house", model, engine_options=_options(model))
        self._tokens = dict(guarded(self._house, _PRINCIPALS))
        self._steady_token = self._tokens.pop("steady")
        self.rpcs = engine_rpcs()
        self._manifest: bytes
        self._client: InferenceClient
        self._expected: Sequence[int]

    @property
    def addresses(self) -> Mapping[str, str]:
        """Service → where it listens."""
        return {ENGINE_SERVICE: self._house.engine.address, STORE_SERVICE: self._house.store.address}

    @property
    def pids(self) -> Sequence[int]:
        return [self._house.engine.pid, self._house.store.pid]

    @property
    def log(self) -> str:
        return self._house.engine.log + self._house.store.log

    def start(self) -> None:
        self._house.start()
        with self._house.client(self._tokens["all"]) as client:
            client.reply(agent_id="the remembered", prompt=_PROMPT, sampling={"max_tokens": 4})
        with self._house.store_client(self._tokens["all"]) as store:
            _, self._manifest = store.get_snapshot("the remembered")
        self._client = self._house.client(self._steady_token)
        self._expected = self._client.reply(prompt=_PROMPT[:60], sampling=_ASKED).token_ids

    def is_well(self) -> str | None:
        """A turn of two tokens says what it said at first, on whatever is loaded."""
        give_up = time.monotonic() + _LOADED_WITHIN_S
        while True:
            try:
                said = self._client.reply(prompt=_PROMPT[:60], sampling=_ASKED, timeout_s=30.0).token_ids
            except (FailedPrecondition, Unavailable) as error:
                # Somebody unloaded the model, or loads one: that is what these requests are for.
                if time.monotonic() > give_up:
                    return f"{error.reason}: {error.message}"
                self._load()
            else:
                return None if said == self._expected else f"it said {said} and not {self._expected}"

    def _load(self) -> None:
        try:
            self._client.load_model("one", drop_unstored=True, timeout_s=_LOADED_WITHIN_S)
        except (FailedPrecondition, Unavailable):
            time.sleep(0.05)

    def end(self) -> Sequence[str]:
        """Stop both; what is wrong with that."""
        self._client.close()
        codes = [service.stop(60) for service in (self._house.engine, self._house.store)]
        return [f"SIGTERM ended them with {codes}"] if any(codes) else []

    def close(self) -> None:
        self._house.close()

    def sending(self, seed: int) -> "contextlib.AbstractContextManager[Send]":
        return sending(self.requests(), self.addresses, seed)

    def requests(self) -> Requests:
        known = _known()
        scenarios = _Memories(self.rpcs, store_rpcs(), self._manifest).all()
        seldom = frozenset({"LoadModel", "UnloadModel"})
        return Requests(self.rpcs, known, self._tokens, scenarios, "all", usual_timeout_s=5.0, seldom=seldom)


def _options(model: Path) -> list[str]:
    """Two models; both admins may change them."""
    return ["--model", f"two={model}", "--service-admin", "all", "--service-admin", "steady"]


def _known() -> Known:
    prompts = ("Hello.", "What is it?", _PROMPT, _PROMPT[:500], "é 💥", "<|im_start|>user\nHi<|im_end|>\n")
    schema = '{"type":"object","properties":{"a":{"type":"string"},"b":{"enum":[1,"two",null]}},"required":["a"]}'
    known: dict[str, Sequence[Any]] = {
        "agent_id": ("", "ada", "bob", "größe"),
        "request_id": ("", "", "again"),
        "model": ("", "", "", "one", "two", "nobody's"),
        "prompt": prompts,
        "text": prompts[:4],
        "content": prompts[:4],  # of a manifest's messages, and their roles
        "role": ("system", "user", "user", "assistant", "tool"),
        "tool_call_id": ("", "call 1"),
        "arguments_json": ("{}", '{"a":[1,{"b":null}]}'),
        "parameters_json": ("{}", schema, '{"type":"object"}'),
        "json_schema": (schema, '{"type":"string","maxLength":3}', '{"const":1}'),
        "regex": ("[a-z ]{1,8}", "(yes|no)", "\\d+"),
        "max_tokens": (1, 1, 2, 3, 8),
        "expected_version": (0, 0, 1),
        "base_version": (1, 1, 2),
        "stop": (".", " the", "ab"),
        "stop_token_ids": (2, 5, 1000),
        "ids": (1, 2, 77, 1000),
        "repetition_penalty": (1.0, 1.2),
        "repetition_tokens": (1, 64),
        "frequency_penalty": (0.0, 0.5, -2.0),
        "presence_penalty": (0.0, 2.0),
        "top_logprobs": (0, 1, 20),
        "n": (1, 1, 2),
        "top_p": (1.0, 0.5),
        "temperature": (0.0, 1.0),
        "key": (1, 2, 1000),
        "value": (-1.0, 100.0),
    }
    return known


class _Memories:
    """Turns over memories that an engine of another make, or an import, may have left in the store."""

    def __init__(self, rpcs: Mapping[str, Rpc], store: Mapping[str, Rpc], manifest: bytes) -> None:
        self._rpcs = rpcs
        self._store = store
        self._manifest = manifest
        self._breaker = Requests(rpcs, _known(), {"": ""}, {}, "")

    def all(self) -> Mapping[str, Scenario]:
        return {
            "Generate over a mutated memory": self._turn,
            "Warm of a mutated memory": self._warm,
            "CancelTurn of a turn that runs": self._cancel,
            "CountTokens of a text": self._count,
        }

    def _count(self, dice: Dice) -> Sequence[Step]:
        request = pb.CountTokensRequest(prompt=_PROMPT[: dice.below(len(_PROMPT))])
        return [Step(self._rpcs["CountTokens"], [self._breaker.broken(request, dice)])]

    def _cancel(self, dice: Dice) -> Sequence[Step]:
        """A turn, others that wait for it, and an end of one of them."""
        names = [f"cancelled {dice.below(10**9)}" for _ in range(dice.between(1, 3))]
        turns = [
            pb.GenerateRequest(
                agent_id=dice.pick(("", names[0])),
                request_id=name,
                prompt=_PROMPT[: dice.pick((60, 1000))],
                sampling=pb.Sampling(max_tokens=600),
                keep_partial=dice.chance(0.5),
            )
            for name in names
        ]
        ended = pb.CancelTurnRequest(request_id=dice.pick(names))
        return [
            *(Step(self._rpcs["Generate"], [turn.SerializeToString()], is_beside=True) for turn in turns),
            Step(self._rpcs["CancelTurn"], [ended.SerializeToString()]),
            *(
                Step(self._rpcs["CancelTurn"], [pb.CancelTurnRequest(request_id=name).SerializeToString()])
                for name in names
            ),
        ]

    def _turn(self, dice: Dice) -> Sequence[Step]:
        name, calls = self._kept(dice)
        request = pb.GenerateRequest(agent_id=name, sampling=pb.Sampling(max_tokens=2))
        if dice.chance(0.3):
            request.append_messages.messages.append(message("user", "And then?"))
        else:
            request.prompt = _PROMPT + "And then?"
        return [*calls, Step(self._rpcs["Generate"], [request.SerializeToString()])]

    def _warm(self, dice: Dice) -> Sequence[Step]:
        name, calls = self._kept(dice)
        return [*calls, Step(self._rpcs["Warm"], [pb.WarmRequest(agent_id=name).SerializeToString()])]

    def _kept(self, dice: Dice) -> tuple[str, Sequence[Step]]:
        """A new agent's name, and what makes a mutated manifest its memory, if the store takes it."""
        change = files.unproven if dice.chance(0.8) else files.manifest
        content = change(self._manifest, dice, _known())
        digest, name = Digest.of(content), f"mutant {dice.below(10**9)}"
        frames = files.frames(digest, content, dice, store_pb.BLOB_KIND_MANIFEST)
        commit = store_pb.CommitSnapshotRequest(agent_id=name, manifest=digest.to_proto())
        return name, [
            Step(self._store["WriteBlobs"], [frame.SerializeToString() for frame in frames]),
            Step(self._store["CommitSnapshot"], [commit.SerializeToString()]),
        ]
