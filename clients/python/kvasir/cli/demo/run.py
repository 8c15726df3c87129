"""The steps of the demo, with real processes: each returns its measurements, and makes its claims about them."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rich.console import Console

from kvasir.cachestore.v1 import cachestore_pb2
from kvasir.cli.demo.mac import Mac
from kvasir.cli.demo.plot import Timing
from kvasir.cli.demo.script import Question, Story, Turn, ask
from kvasir.cli.talking.turn import TurnResult
from kvasir.clients import message
from kvasir.common.v1 import message_pb2
from kvasir.errors import KvasirError


@dataclass(frozen=True, slots=True)
class Claim:
    """A sentence, whether it held, and what was found."""

    text: str
    holds: bool
    found: str


@dataclass
class Claims:
    """Collects claims and prints each at once."""

    out: Console
    made: list[Claim] = field(default_factory=list)

    def check(self, text: str, holds: bool, found: str = "") -> None:
        """Claim `text`; `found` is shown in brackets."""
        self.made.append(Claim(text, holds, found))
        mark, style = ("✓", "green") if holds else ("✗ NOT TRUE:", "bold red")
        self.out.print(mark, style=style, end=" ")
        self.out.print(text + (f" ({found})" if found else ""))

    @property
    def broken(self) -> list[Claim]:
        return [claim for claim in self.made if not claim.holds]


# The best of this many forks: other work of the machine must not be measured.
_REPEATS = 3
_WARM_UP = "Hello."


@dataclass(frozen=True, slots=True)
class AnsweredTurn:
    """A turn and the agent's answer."""

    turn: Turn
    result: TurnResult

    @property
    def is_right(self) -> bool:
        return self.turn.question.value in self.result.reply


@dataclass(frozen=True, slots=True)
class Life:
    """The turns that an agent has lived through, and the turns after which it was forked to be timed later."""

    story: Story
    answered: tuple[AnsweredTurn, ...]
    forked_after: tuple[int, ...]

    @property
    def tokens(self) -> int:
        last = self.answered[-1].result
        return last.prompt_tokens + last.completion_tokens

    def messages(self, turns: int) -> list[message_pb2.Message]:
        """The conversation after so many turns, as a client without Kvasir would send it."""
        said: list[message_pb2.Message] = []
        for each in self.answered[:turns]:
            said += each.turn.messages
            said.append(message("assistant", each.result.reply))
        return said


OnAnswer = Callable[[AnsweredTurn], None]


def fork_name(agent: str, turns: int, number: int) -> str:
    return f"{agent}, after turn {turns} ({number})"


def live(mac: Mac, story: Story, *, fork_after: Sequence[int] = (), on_answer: OnAnswer | None = None) -> Life:
    """Let an agent live through its story; fork it after some turns, which copies nothing."""
    answered: list[AnsweredTurn] = []
    with mac.store_client() as store:
        for number, turn in enumerate(story.turns, 1):
            each = AnsweredTurn(turn, mac.say(story.agent, turn.messages, is_new=number == 1))
            answered.append(each)
            if on_answer is not None:
                on_answer(each)
            if number in fork_after:
                for repeat in range(_REPEATS):
                    store.fork_agent(story.agent, fork_name(story.agent, number, repeat))
    return Life(story, tuple(answered), tuple(fork_after))


def warm_up(mac: Mac) -> None:
    """Let the engine compute once, so that no timing includes work that a process does only once."""
    mac.say("", [message("user", _WARM_UP)], is_new=True)


def die_in_a_turn(mac: Mac, agent: str, messages: Sequence[message_pb2.Message]) -> KvasirError | None:
    """`kill -9` both services in the middle of a turn. Returns the error that its client gets."""
    started = threading.Event()
    ended: list[KvasirError | None] = []

    def speak() -> None:
        try:
            mac.say(agent, messages, on_started=lambda _started: started.set(), max_tokens=400)
            ended.append(None)
        except KvasirError as error:
            ended.append(error)

    speaker = threading.Thread(target=speak)
    speaker.start()
    started.wait(30)
    mac.kill()
    speaker.join()
    return ended[0]


def go_on(mac: Mac, story: Story, claims: Claims, life: Life, question: Question) -> AnsweredTurn:
    """Ask an agent after the restart: it remembers, from the store."""
    answered = AnsweredTurn(ask(question), mac.say(story.agent, ask(question).messages))
    result = answered.result
    claims.check(
        f"{story.agent} goes on from the store",
        result.source == "warm" and result.cached_tokens >= life.tokens - 1,
        f"{result.cached_tokens} of {result.prompt_tokens} prompt tokens were not computed again",
    )
    return answered


def time_forks(mac: Mac, life: Life) -> list[tuple[TurnResult, TurnResult]]:
    """For each fork point: the best warm turn, and the best hot turn right after one."""
    best = []
    for turns in life.forked_after:
        names = (fork_name(life.story.agent, turns, repeat) for repeat in range(_REPEATS))
        pairs = [[mac.say(name, life.story.ask(number).messages) for number in (2, 3)] for name in names]
        warm, hot = (min(each, key=lambda result: result.first_token_s) for each in zip(*pairs, strict=True))
        best.append((warm, hot))
    return best


def time_cold(mac: Mac, life: Life) -> list[TurnResult]:
    """The same questions to an engine that never met the agent and must compute everything."""
    question = life.story.ask(2).messages
    return [mac.say("", [*life.messages(turns), *question], is_new=True) for turns in life.forked_after]


def check_timings(claims: Claims, timings: Sequence[Timing]) -> None:
    """Check that the sources are those of the table, and that warm is much faster than cold."""
    claims.check(
        "cold turns computed everything, warm ones came from the store, hot ones from the engine",
        all((each.cold.source, each.warm.source, each.hot.source) == ("cold", "warm", "hot") for each in timings)
        and not any(each.cold.cached_tokens for each in timings),
    )
    longest = timings[-1]
    ratio = longest.warm.first_token_s / longest.cold.first_token_s
    claims.check(
        f"at {longest.tokens} tokens, from the store takes at most a fifth of the time",
        ratio <= 0.2,
        f"{ratio:.3f} of it",
    )


def differences(ours: Sequence[AnsweredTurn], theirs: Sequence[AnsweredTurn]) -> list[str]:
    """The turns with different replies, compared token for token."""
    return [
        f"{mine.turn.question.text} {mine.result.reply!r} against {other.result.reply!r}"
        for mine, other in zip(ours, theirs, strict=True)
        if mine.result.token_ids != other.result.token_ids
    ]


def pull(mac: Mac, agent: str) -> cachestore_pb2.SnapshotVersion:
    """Copy an agent from the first Mac."""
    with mac.store_client() as store:
        return store.pull_agent("first", agent)


def says_not_told(answered: AnsweredTurn) -> bool:
    """Whether the agent said that it was not told, and did not say the secret."""
    return "not told" in answered.result.reply and not answered.is_right
