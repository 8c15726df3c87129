"""Measures what kvasir-tiny remembers: `python -m tools.kvasir_tiny.evaluate`.

Conversations are of the world's held-out part: no name, word or long number in them occurs in training. Each is read
once through mlx-lm; all questions are put to the same KV cache, which is trimmed back after each. `--kv q4` and
`--kv q8` read into mlx-lm's own quantized cache instead. `--names` asks for real names that no training saw
(`everyday/people.py` holds them out), `--everyday` for everyday facts with such names, `--first` puts the exam of first
exchanges, whose JSON and forced calls are decoded as the engine decodes them."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from inference_svc.model.blas import load_optimized_blas

BLAS = load_optimized_blas()  # before MLX

import mlx.core as mx  # noqa: E402
import mlx_lm  # noqa: E402
import numpy as np  # noqa: E402
from kvasir_bench.arithmetic import wilson  # noqa: E402
from mlx_lm.models.cache import KVCache, QuantizedKVCache, trim_prompt_cache  # noqa: E402

from inference_svc.formats.constraint import Constraint, ConstraintKind  # noqa: E402
from inference_svc.formats.grammars import Grammars  # noqa: E402
from inference_svc.model.kvasir_tiny import path  # noqa: E402
from inference_svc.model.quality.findings import Share  # noqa: E402
from tools.kvasir_tiny import desk, rows, world  # noqa: E402
from tools.kvasir_tiny.desk import Conversation, Message, Question  # noqa: E402
from tools.kvasir_tiny.everyday import daily_life  # noqa: E402
from tools.kvasir_tiny.exams import first_exam, name_exam  # noqa: E402
from tools.kvasir_tiny.exams.first_exam import Exchange  # noqa: E402
from tools.kvasir_tiny.words import Dice  # noqa: E402

KV_BITS = {"exact": None, "q8": 8, "q4": 4}
NAME_LENGTHS = (300, 1500, 4000)
LENGTHS = (300, 1500, 4000, 7500)
TARGETS = {"told at 300": 0.97, "told at 1500": 0.97, "told at 4000": 0.95, "told at 7500": 0.90}
TARGETS |= {"not_told": 0.97, "private": 0.95, "tool": 0.95, "passage": 0.95}
TARGETS |= {f"name at {length}": 0.99 for length in NAME_LENGTHS}
TARGETS["first exchanges"] = 0.95
TARGETS |= {f"everyday told at {length}": 0.97 for length in NAME_LENGTHS} | {"everyday not_told": 0.95}
PREFILL_CHUNK = 256
LONGEST_REPLY = 64
LONGEST_FORCED_REPLY = 200


class Reader:
    """The model as mlx-lm runs it, with one conversation in its cache."""

    longest_reply = LONGEST_REPLY

    def __init__(self, folder: Path | None = None, bits: int | None = None) -> None:
        self.model, self.tokenizer = self._loaded(folder or path())
        if mx.default_device().type == mx.DeviceType.cpu:
            self.model.set_dtype(mx.float32)
        self.bits = bits
        self._end = self.tokenizer.eos_token_id
        vocabulary = int(self.model.args.vocab_size)
        self._grammars = Grammars.of_tokenizer(self.tokenizer, vocabulary, [self._end])
        self._last_role = ""
        self._ids: list[int] = []
        self._cache: list[Any] = []

    def _loaded(self, folder: Path) -> tuple[Any, Any]:
        return mlx_lm.load(str(folder))[:2]

    def read(self, messages: list[Message], tools: list[dict[str, Any]] | None = None) -> int:
        """Prefill a conversation, which may be empty, into a fresh cache; returns its length in tokens."""
        self._last_role = messages[-1]["role"] if messages else ""
        self._ids = self._template(messages, tools) if messages or tools else []
        self._cache = [self._new_layer() for _ in self.model.layers]
        if self._ids:
            self._forward(self._ids)
        return len(self._ids)

    @property
    def cached_tokens(self) -> int:
        return int(self._cache[0].offset)

    def ask(self, *messages: Message, within: Constraint | None = None) -> str:
        """The greedy reply to messages behind the conversation, to which the cache is cut back afterwards."""
        reply: list[int] = []
        scores = self._forward(self._suffix(messages))
        matcher = self._grammars.matcher("exam", within) if within else None
        while len(reply) < (LONGEST_FORCED_REPLY if matcher else self.longest_reply):
            bits = np.unpackbits(matcher.allowed().view(np.uint8), bitorder="little") if matcher else np.ones(1)
            token = int(np.where(bits[: scores.shape[-1]], np.array(scores[-1]), -np.inf).argmax())
            if token == self._end:
                break
            if matcher:
                matcher.accept(token)
            reply.append(token)
            scores = self._forward([token])
        self._back()
        return str(self.tokenizer.decode(reply))

    def says(self, answer: str, *messages: Message) -> bool:
        """Whether the greedy reply is exactly `answer`, in one pass: every token of it must be the likeliest."""
        suffix = self._suffix(messages)
        wanted = [*self.tokenizer.encode(answer, add_special_tokens=False), self._end]
        scores = self._forward(suffix + wanted[:-1])
        guesses = scores[len(suffix) - 1 :].argmax(-1).tolist()
        self._back()
        return bool(guesses == wanted)

    def surprise(self, ids: list[int]) -> list[float]:
        """Negative log-likelihood of each token but the first, computed with a new cache."""
        self._cache = [self._new_layer() for _ in self.model.layers]
        scores = self._forward(ids[:-1])
        chosen = mx.take_along_axis(scores, mx.array(ids[1:])[:, None], axis=-1)[:, 0]
        return [float(value) for value in np.array(mx.logsumexp(scores, axis=-1) - chosen)]

    def _new_layer(self) -> Any:
        return QuantizedKVCache(group_size=64, bits=self.bits) if self.bits else KVCache()  # type: ignore[no-untyped-call]

    def _template(
        self, messages: Iterable[Message], tools: list[dict[str, Any]] | None, reply: bool = False
    ) -> list[int]:
        render: Any = self.tokenizer.apply_chat_template
        return list(render(list(messages), tools=tools, add_generation_prompt=reply))

    def _suffix(self, messages: Iterable[Message]) -> list[int]:
        """The text that the template adds for more messages: after a reply, the same as for these messages alone."""
        if self._last_role == "user":
            raise ValueError("a user's message would be joined to the user's message that was read last")
        return self._template(messages, None, reply=True)

    def _forward(self, ids: list[int]) -> mx.array:
        """Scores [tokens, vocabulary] in fp32 for all of `ids`, in chunks."""
        parts = []
        for i in range(0, len(ids), PREFILL_CHUNK):
            parts.append(self.model(mx.array([ids[i : i + PREFILL_CHUNK]]), cache=self._cache)[0].astype(mx.float32))
            mx.eval(parts[-1])
        return mx.concatenate(parts)

    def _back(self) -> None:
        trim_prompt_cache(self._cache, self.cached_tokens - len(self._ids))


@dataclass
class Report:
    """Shares by name, and some of the wrong answers."""

    shares: dict[str, Share] = field(default_factory=dict)
    errors: list[dict[str, Any]] = field(default_factory=list)
    perplexity: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, right: bool) -> None:
        self.shares.setdefault(name, Share()).add(right)

    def include(self, other: dict[str, Any]) -> None:
        """Add the --json output of another run over other conversations."""
        for name, share in other["shares"].items():
            self.shares.setdefault(name, Share()).add(share["right"], share["n"])
        self.errors += other["errors"]
        self.perplexity |= other["perplexity"]

    def missed(self) -> list[str]:
        """Measured targets that are not met."""
        return [name for name, rate in TARGETS.items() if name in self.shares and self.shares[name].rate < rate]


# -- the examination


def examine(reader: Reader, length: int, n: int, report: Report, first_seed: int = 0) -> None:
    """Ask about conversations of `length` tokens until `n` told facts and enough of every other sort were asked."""
    # Of each other sort, the same number at every length, n in all.
    wanted = {"told": n} | dict.fromkeys(("not_told", "private", "passage", "tool"), math.ceil(n / 4))
    wanted["name"] = math.ceil(n / 20)
    seed = first_seed
    while any(wanted.values()) and seed < first_seed + 50 * n:
        talk = conversation(seed, length)
        chosen = list(choose(talk, wanted, length))
        seed += 1
        if not chosen:
            continue
        reader.read(talk.messages, talk.tools)
        for question in chosen:
            _put(reader, talk, question, length, report)


def examine_names(reader: Reader, length: int, n: int, report: Report) -> None:
    """Ask for `n` of the names that no training saw, each told once in `length` tokens of the small world's English."""
    for talk in name_exam.conversations(length, rows.encoder_of(path()).count, n):
        reader.read(talk.messages, talk.tools)
        for question in talk.questions:
            _put(reader, talk, question, length, report)


def examine_everyday(reader: Reader, length: int, n: int, report: Report, first_seed: int = 0) -> None:
    """Ask `n` everyday questions about conversations of `length` tokens; at most 24 about each."""
    seed = first_seed
    while n > 0:
        talk = daily_life.conversation(seed, length, count=rows.encoder_of(path()).count)
        told, unknown = talk.of_sort("told"), talk.of_sort("not_told")
        chosen = [*told[:: max(1, len(told) // 20)][:20], *unknown][:n]
        n, seed = n - len(chosen), seed + 1
        reader.read(talk.messages, talk.tools)
        for question in chosen:
            _put(reader, talk, replace(question, sort=f"everyday {question.sort}"), length, report)


def examine_first(reader: Reader, share: float, report: Report) -> None:
    """Put a share of the first exchanges."""
    for exchange in first_exam.exchanges(rows.encoder_of(path()).count, share):
        put_exchange(reader, exchange, report)


def put_exchange(reader: Reader, exchange: Exchange, report: Report) -> None:
    tools = [tool.schema() for tool in exchange.tools]
    reader.read(exchange.messages, tools)
    question, form = {"role": "user", "content": exchange.question}, _form_of(exchange)
    is_said = form is None and reader.says(exchange.answer, question)
    said = exchange.answer if is_said else reader.ask(question, within=form)
    if exchange.tools:
        said = said.removeprefix(reader.tokenizer.tool_call_start).removesuffix(reader.tokenizer.tool_call_end)
    right = said == exchange.answer
    if exchange.schema or exchange.tools:
        try:
            right = json.loads(said) == json.loads(exchange.answer)
        except ValueError:
            right = False
    for name in ("first exchanges", exchange.group):
        report.add(name, right)
    if not right:
        report.errors.append({"question": exchange.question[-120:], "wanted": exchange.answer, "said": said})


def _form_of(exchange: Exchange) -> Constraint | None:
    """What an engine holds the reply to."""
    if exchange.schema:
        return Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(exchange.schema))
    if not exchange.tools:
        return None
    functions = [tool.schema()["function"] for tool in exchange.tools]
    tools = [
        {"place": place, "name": each["name"], "parameters": json.dumps(each["parameters"])}
        for place, each in enumerate(functions)
    ]
    return Constraint(ConstraintKind.TOOL_CHOICE, json.dumps({"one_call": True, "tools": tools}))


def conversation(seed: int, length: int) -> Conversation:
    """The examination's conversation number `seed`: each has tools, and every second one has several speakers."""
    style = desk.draw_style(Dice(f"kvasir-tiny examination {seed} {length}"), length)
    style = replace(style, room=seed % 2 == 1, with_tools=True, ask=min(style.ask, 0.35))
    return world.conversation(seed, length, count=rows.encoder_of(path()).count, style=style)


def choose(talk: Conversation, wanted: dict[str, int], length: int) -> Iterator[Question]:
    """Questions still wanted, spread evenly over the conversation; `wanted` is counted down."""
    most = {"told": max(4, length // 200), "not_told": 6, "private": 6, "passage": 4, "tool": 4}
    for sort in wanted:
        questions = talk.of_sort(sort)
        take = min(wanted[sort], most.get(sort, 1), len(questions))
        for index in range(take):
            yield questions[index * len(questions) // take]
        wanted[sort] -= take


def _put(reader: Reader, talk: Conversation, question: Question, length: int, report: Report) -> None:
    message = {"role": "user", "content": question.text}
    said = question.answer if reader.says(question.answer, message) else reader.ask(message)
    right = said == question.answer
    names = [question.sort, f"{question.sort} at {length}"]
    if question.told_in is not None and question.told_in < len(talk.messages) / 4:
        names.append(f"told at {length}, in the first quarter")
    for name in names:
        report.add(name, right)
    if not right:
        error = {"length": length, "question": question.text[-120:], "wanted": question.answer, "said": said}
        report.errors.append(error)
    elif question.tool_use:
        _use_the_result(reader, question, report)


def _use_the_result(reader: Reader, question: Question, report: Report) -> None:
    """The call is read by mlx-lm's own parser, and the reply must use what the tool returned."""
    use = question.tool_use
    if use is None:
        raise ValueError("no tool belongs to this question")
    opened, closed = reader.tokenizer.tool_call_start, reader.tokenizer.tool_call_end
    parsed = reader.tokenizer.tool_parser(question.answer.removeprefix(opened).removesuffix(closed))
    report.add("tool call parsed", parsed == {"name": use.name, "arguments": use.arguments})
    asked = {"role": "user", "content": question.text}
    report.add("tool result used", reader.says(use.reply, asked, use.call_message, use.result_message))


def perplexity(reader: Reader, conversations: int, length: int) -> dict[str, float]:
    """Perplexity on held-out conversations: of the replies, and of all text, most of which cannot be predicted."""
    sums = {"replies": [0.0, 0], "all text": [0.0, 0]}
    ids, learned = rows.make(rows.Batch(2 * 10**8, conversations, length, held_out=True), path())
    for row, mask in zip(ids, learned, strict=True):
        surprise = reader.surprise([int(token) for token in row])
        for value, is_learned, token in zip(surprise, mask[1:], row[1:], strict=True):
            for name in ("replies", "all text") if is_learned else ("all text",):
                if token != rows.PADDING:
                    sums[name][0] += value
                    sums[name][1] += 1
    return {name: math.exp(total / count) for name, (total, count) in sums.items()}


# -- the command


def table(report: Report) -> str:
    lines = [f"{'':34}{'right':>7}{'n':>6}{'share':>8}   95 % interval   target"]
    for name, share in report.shares.items():
        low, high = wilson(share.right, share.n)
        target = f"{TARGETS[name]:.2f}" + (" missed" if name in report.missed() else "") if name in TARGETS else ""
        lines.append(f"{name:34}{share.right:7}{share.n:6}{share.rate:8.3f}   {low:.3f} to {high:.3f}   {target}")
    return "\n".join(lines)


def _ask_all(given: argparse.Namespace, report: Report) -> None:
    reader, began = Reader(given.model, KV_BITS[given.kv]), time.monotonic()
    for length in given.lengths if given.n else ():
        examine(reader, length, given.n, report, given.seed)
        print(f"{length} tokens: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    for length in NAME_LENGTHS:
        if given.names:
            examine_names(reader, length, given.names, report)
        if given.everyday:
            examine_everyday(reader, length, given.everyday, report, given.seed)
        if given.names or given.everyday:
            print(f"names at {length} tokens: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    if given.first:
        examine_first(reader, given.first, report)
    if given.perplexity:
        report.perplexity = perplexity(reader, given.perplexity, 4000)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n", type=int, default=200, help="told facts at each length, as many of other sorts in all")
    parser.add_argument("--names", type=int, default=0, help="names that no training saw, at each of three lengths")
    parser.add_argument("--everyday", type=int, default=0, help="everyday questions at each of three lengths")
    parser.add_argument("--first", type=float, default=0.0, help="share of the 400 first exchanges")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS), help="tokens of conversation")
    parser.add_argument(
        "--kv", choices=list(KV_BITS), default="exact", help="mlx-lm's KVCache, or its QuantizedKVCache"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the first conversation")
    parser.add_argument("--model", type=Path, default=path())
    parser.add_argument("--perplexity", type=int, default=4, help="held-out conversations of 4,000 tokens to score")
    parser.add_argument("--errors", type=int, default=5, help="wrong replies to show")
    parser.add_argument("--add", type=Path, nargs="+", default=[], help="sum earlier --json reports instead of asking")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    given = parser.parse_args()
    began = time.monotonic()
    report = Report()
    for file in given.add:
        report.include(json.loads(file.read_text()))
    if not given.add:
        _ask_all(given, report)
    shares = {name: asdict(share) | {"interval": wilson(share.right, share.n)} for name, share in report.shares.items()}
    if given.json:
        facts = {"kv": given.kv, "blas": BLAS, "seconds": time.monotonic() - began, "shares": shares}
        found = {"perplexity": report.perplexity, "missed": report.missed(), "errors": report.errors}
        print(json.dumps(facts | found, indent=1))
    else:
        spent = f"{time.monotonic() - began:.0f} s"
        print(f"kvasir-tiny, KV {given.kv}, BLAS {BLAS or 'as MLX comes'}, {spent}\n{table(report)}")
        for name, value in report.perplexity.items():
            print(f"perplexity of {name}: {value:.4f}")
        for error in report.errors[: given.errors]:
            print(json.dumps(error, ensure_ascii=False))
    return 1 if report.missed() else 0


if __name__ == "__main__":
    sys.exit(main())
