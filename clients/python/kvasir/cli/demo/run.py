"""What the demo does with its Macs, their agents and their ends; and the claims that it makes about them."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rich.console import Console

from kvasir.cli.demo.mac import Mac
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
    """The turns that an agent has lived through."""

    story: Story
    answered: tuple[AnsweredTurn, ...]

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


def forks(agent: str, turns: int) -> list[str]:
    """The names of an agent's forks after so many turns."""
    return [f"{agent}, after turn {turns} ({number})" for number in range(_REPEATS)]


def live(
    mac: Mac,
    story: Story,
    fork_after: Sequence[int] = (),
    on_answer: Callable[[AnsweredTurn], None] = lambda _answered: None,
) -> Life:
    """Let an agent live through its story; fork it after some turns, which copies nothing."""
    answered: list[AnsweredTurn] = []
    with mac.store_client() as store:
        for number, turn in enumerate(story.turns, 1):
            answered.append(AnsweredTurn(turn, mac.say(story.agent, turn.messages, is_new=number == 1)))
            on_answer(answered[-1])
            for name in forks(story.agent, number) if number in fork_after else ():
                store.fork_agent(story.agent, name)
    return Life(story, tuple(answered))


def answer(mac: Mac, agent: str, question: Question) -> AnsweredTurn:
    turn = ask(question)
    return AnsweredTurn(turn, mac.say(agent, turn.messages))


def start(mac: Mac) -> float:
    """Start a Mac, and let its engine compute once, so that no timing includes work that a process does only once;
    seconds until both services were ready."""
    seconds = mac.start()
    mac.say("", [message("user", "Hello.")], is_new=True)
    return seconds


def die_in_a_turn(mac: Mac, agent: str, messages: Sequence[message_pb2.Message]) -> KvasirError | None:
    """`kill -9` both services in the middle of a turn. The error that its client gets; None if it was too late."""
    started = threading.Event()
    ended: list[KvasirError] = []

    def speak() -> None:
        try:
            mac.say(agent, messages, on_started=lambda _started: started.set(), max_tokens=400)
        except KvasirError as error:
            ended.append(error)

    speaker = threading.Thread(target=speak)
    speaker.start()
    started.wait(30)
    mac.kill()
    speaker.join()
    return ended[0] if ended else None
