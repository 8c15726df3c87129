"""What a tenant can do to an engine with the role client: for each shared resource, the most that it takes."""

import itertools
import json
import random
from typing import Any

from kvasir.common.v1.message_pb2 import ROLE_ASSISTANT, ROLE_USER, Message, Part, ToolCall
from kvasir.inference.v1 import inference_pb2 as pb

from tests.campaigns.fairness.attacker import Attacker, consume

_RPC = "/kvasir.inference.v1.InferenceService/"
_HEALTH = "/grpc.health.v1.Health/Check"
_SENTENCE = "They talked about the weather, the road and the price of bread until it was dark. "
# The model's own end tokens are banned: who takes all does not stop early.
_NO_END = {0: -100.0, 2: -100.0}
_LONG: dict[str, Any] = {"max_tokens": 512, "logit_bias": _NO_END}


async def silent_strangers(me: Attacker) -> None:
    """1,024 calls of Health/Check without a credential that never send their message."""
    me.hold(me.engine_address, _HEALTH, 1024, is_known=False)


async def silent_calls(me: Attacker) -> None:
    """As many calls as four credentials may have, that never send their message."""
    me.hold(me.engine_address, _RPC + "GetCapabilities", 1024, is_known=True)


async def half_messages(me: Attacker) -> None:
    """400 messages of 16 MiB of which the last byte does not come."""
    me.withhold(me.engine_address, _RPC + "CountTokens", 16 << 20, calls=400)


async def long_turns(me: Attacker) -> None:
    """192 turns that each say 512 words: every place that a namespace may take."""
    _flood_turns(me, 192, prompt="Tell me everything.", sampling=_LONG)


async def long_prompts(me: Attacker) -> None:
    """48 prompts of some six thousand tokens, never the same one, to be computed for one token each."""
    numbers = itertools.count()

    def turn(engine: Any) -> Any:
        prompt = f"Number {next(numbers)}. " + _SENTENCE * 240
        return engine.reply(prompt=prompt, sampling={"max_tokens": 1})

    engines = [me.engine() for _ in range(8)]
    me.flood(48, lambda index: turn(engines[index % 8]))


async def prompt_bytes(me: Attacker) -> None:
    """32 prompts of 8 MiB that wait for one agent, which has a long turn to say."""
    engine = me.engine()
    me.flood(1, lambda _: engine.reply(agent_id="one", prompt="Go on.", sampling=_LONG))
    _flood_turns(me, 32, agent_id="one", prompt="x" * ((8 << 20) - 1), sampling={"max_tokens": 1})


async def kv_backlog(me: Attacker) -> None:
    """Turns that may come to need all KV that may be asked for."""
    _flood_turns(me, 128, prompt="Tell me everything.", sampling={"max_tokens": 7000, "logit_bias": _NO_END})


async def background(me: Attacker) -> None:
    """Background turns that ask for most of the KV, and leave after a while to come again."""
    engines = [me.engine() for _ in range(4)]
    prompt = _SENTENCE * 200

    def turn(index: int) -> Any:
        return engines[index % 4].reply(
            prompt=f"{index} {prompt}",
            sampling={"max_tokens": 2900, "logit_bias": _NO_END},  # all of the context
            priority=pb.PRIORITY_BACKGROUND,
            timeout_s=15.0,
        )

    me.flood(24, turn)


async def restoring(me: Attacker) -> None:
    """More agents with long memories than stay hot, each asked in turn: every turn is read from the store."""
    engines = [me.engine() for _ in range(4)]
    sampling = {"max_tokens": 1}

    async def turn(index: int) -> None:
        for number in range(index, 96, 16):
            await engines[index % 4].reply(
                agent_id=f"m{number}", prompt=f"{number} " + _SENTENCE * 160, sampling=sampling
            )

    me.flood(16, turn)


async def format_trials(me: Attacker) -> None:
    """Formats that take all the time that a trial has, each another one."""
    numbers = itertools.count()
    engines = [me.engine() for _ in range(4)]

    def turn(index: int) -> Any:
        regex = f"a{{{90_000_000 + next(numbers)}}}"
        return engines[index % 4].reply(prompt="Hi", regex=regex, sampling={"max_tokens": 1})

    me.flood(32, turn, refused="FORMAT_TOO_COMPLEX")


async def masks_of_8(me: Attacker) -> None:
    """8 turns of a format whose every step is expensive."""
    _masks(me, 8)


async def masks_of_32(me: Attacker) -> None:
    """32 turns of a format whose every step is expensive."""
    _masks(me, 32)


async def nested_json(me: Attacker) -> None:
    """12 conversations with a tool call whose arguments are 8 MiB of nested arrays."""
    nested = "[" * 500 + "]" * 500
    arguments = '{"a":[' + ",".join([nested] * (8 * (1 << 20) // 1001 - 100)) + "]}"
    called = Message(role=ROLE_ASSISTANT, tool_calls=[ToolCall(id="1", name="f", arguments_json=arguments)])
    messages = [called, Message(role=ROLE_USER, parts=[Part(text="And?")])]
    _flood_turns(me, 12, "INVALID_FIELD", messages=messages, sampling={"max_tokens": 1})


async def counting(me: Attacker) -> None:
    """Prompts of 2 MiB whose tokens are to be counted: the threads that tokenize."""
    engines = [me.engine() for _ in range(8)]
    prompt = _SENTENCE * ((2 << 20) // len(_SENTENCE))
    me.flood(32, lambda index: engines[index % 8].count_tokens(prompt=prompt), "CONTEXT_EXCEEDED")


async def unread(me: Attacker) -> None:
    """64 streams with twenty log probabilities per token that nobody reads."""
    sampling = pb.Sampling(max_tokens=2000, logprobs=True, top_logprobs=20, logit_bias=_NO_END)
    message = pb.GenerateRequest(prompt="Go on.", sampling=sampling).SerializeToString()
    me.hold(me.engine_address, _RPC + "Generate", 64, is_known=True, messages=[message])


async def warming(me: Attacker) -> None:
    """Agents warmed with long prompts, ever others: KV that is hot for nobody."""
    numbers = itertools.count()
    engines = [me.engine() for _ in range(8)]

    def warm(index: int) -> Any:
        prompt = f"{next(numbers)} " + _SENTENCE * 120
        return engines[index % 8].warm(agent_id=f"w{next(numbers)}", prompt=prompt)

    me.flood(32, warm)


def _masks(me: Attacker, count: int) -> None:
    source = random.Random(1)
    constant = "".join(source.choices("abcdefghijklmnopqrstuvwxyz ", k=60_000))
    schema = json.dumps({"const": constant})
    # On a busy machine its trial takes too long.
    _flood_turns(me, count, "FORMAT_TOO_COMPLEX", prompt="Say it.", json_schema=schema, sampling=_LONG)


def _flood_turns(me: Attacker, count: int, refused: str = "", **turn: Any) -> None:
    engines = [me.engine() for _ in range(8)]
    me.flood(count, lambda index: consume(engines[index % 8].generate(**turn)), refused)
