"""What happens in the demo, step by step, with real processes: live, die, go on, compare, move, keep a secret.

Every step returns what was measured and puts what it says of it to `Claims`.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvasir.cachestore.v1 import cachestore_pb2, manifest_pb2
from kvasir.cli.demo.claims import Claims
from kvasir.cli.demo.mac import Mac
from kvasir.cli.demo.plot import Timing
from kvasir.cli.demo.script import Question, Story, Turn, ask
from kvasir.cli.talk import Heard
from kvasir.errors import KvasirError

# The best of so many forks: what else the machine does is not what is measured.
_REPEATS = 3
_WARM_UP = "Hello."


@dataclass(frozen=True, slots=True)
class Told:
    """A turn and what the agent said."""

    turn: Turn
    heard: Heard

    @property
    def is_right(self) -> bool:
        return self.turn.question.value in self.heard.reply


@dataclass(frozen=True, slots=True)
class Life:
    """The turns that an agent has lived through, and the turns after which it was forked to be timed later."""

    story: Story
    told: tuple[Told, ...]
    forked_after: tuple[int, ...]

    @property
    def tokens(self) -> int:
        last = self.told[-1].heard
        return last.prompt_tokens + last.completion_tokens

    def messages(self, turns: int) -> list[manifest_pb2.Message]:
        """The conversation after so many turns, as a client without Kvasir would send it."""
        said: list[manifest_pb2.Message] = []
        for each in self.told[:turns]:
            said += each.turn.messages
            said.append(manifest_pb2.Message(role="assistant", content=each.heard.reply))
        return said


OnTold = Callable[[Told], None]


def fork_name(agent: str, turns: int, number: int) -> str:
    return f"{agent}, after turn {turns} ({number})"


def live(mac: Mac, story: Story, *, fork_after: Sequence[int] = (), on_told: OnTold | None = None) -> Life:
    """Let an agent live through its story; fork it after some turns, which copies nothing."""
    told: list[Told] = []
    with mac.store_client() as store:
        for number, turn in enumerate(story.turns, 1):
            each = Told(turn, mac.say(story.agent, turn.messages, is_new=number == 1))
            told.append(each)
            if on_told is not None:
                on_told(each)
            if number in fork_after:
                for repeat in range(_REPEATS):
                    store.fork_agent(story.agent, fork_name(story.agent, number, repeat))
    return Life(story, tuple(told), tuple(fork_after))


def warm_up(mac: Mac) -> None:
    """Let the engine compute once, so that no timing holds what a process does only once."""
    mac.say("", [manifest_pb2.Message(role="user", content=_WARM_UP)], is_new=True)


def die_in_a_turn(mac: Mac, story: Story) -> KvasirError | None:
    """`kill -9` both services while the agent is being told something; what its client is told of that."""
    started = threading.Event()
    ended: list[KvasirError | None] = []

    def speak() -> None:
        try:
            mac.say(story.agent, [*story.turns[0].messages], on_started=lambda _started: started.set(), max_tokens=400)
            ended.append(None)
        except KvasirError as error:
            ended.append(error)

    speaker = threading.Thread(target=speak)
    speaker.start()
    started.wait(30)
    mac.kill()
    speaker.join()
    return ended[0]


def go_on(mac: Mac, story: Story, claims: Claims, life: Life, question: Question) -> Told:
    """Ask an agent after the restart; it remembers from the store."""
    told = Told(ask(question), mac.say(story.agent, ask(question).messages))
    heard = told.heard
    claims.check(
        f"{story.agent} goes on from the store",
        heard.source == "warm" and heard.cached_tokens >= life.tokens - 1,
        f"{heard.cached_tokens} of {heard.prompt_tokens} prompt tokens were not computed again",
    )
    return told


def time_forks(mac: Mac, life: Life) -> dict[int, tuple[Heard, Heard]]:
    """For each fork point: the best warm turn, and the best hot turn right after one."""
    best: dict[int, tuple[Heard, Heard]] = {}
    for turns in life.forked_after:
        pairs = []
        for repeat in range(_REPEATS):
            name = fork_name(life.story.agent, turns, repeat)
            pairs.append(tuple(mac.say(name, life.story.ask(number).messages) for number in (2, 3)))
        warm = min((pair[0] for pair in pairs), key=lambda heard: heard.first_token_s)
        hot = min((pair[1] for pair in pairs), key=lambda heard: heard.first_token_s)
        best[turns] = (warm, hot)
    return best


def time_cold(mac: Mac, life: Life) -> dict[int, Heard]:
    """The same questions to an engine that never met the agent: it reads everything."""
    return {
        turns: mac.say("", [*life.messages(turns), *life.story.ask(2).messages], is_new=True)
        for turns in life.forked_after
    }


def timings(warm_and_hot: dict[int, tuple[Heard, Heard]], cold: dict[int, Heard]) -> list[Timing]:
    return [
        Timing(
            tokens=warm.prompt_tokens,
            cold_s=cold[turns].first_token_s,
            warm_s=warm.first_token_s,
            hot_s=hot.first_token_s,
            cold_cached_tokens=cold[turns].cached_tokens,
            warm_cached_tokens=warm.cached_tokens,
            hot_cached_tokens=hot.cached_tokens,
        )
        for turns, (warm, hot) in warm_and_hot.items()
    ]


def check_timings(claims: Claims, warm_and_hot: dict[int, tuple[Heard, Heard]], cold: dict[int, Heard]) -> None:
    """The sources were what the table says, and warm is what it is for."""
    claims.check(
        "cold turns computed everything, warm ones came from the store, hot ones from the engine",
        all(heard.source == "cold" and heard.cached_tokens == 0 for heard in cold.values())
        and all(warm.source == "warm" and hot.source == "hot" for warm, hot in warm_and_hot.values()),
    )
    longest = max(warm_and_hot)
    ratio = warm_and_hot[longest][0].first_token_s / cold[longest].first_token_s
    claims.check(
        f"at {warm_and_hot[longest][0].prompt_tokens} tokens, from the store takes at most a fifth of the time",
        ratio <= 0.2,
        f"{ratio:.3f} of it",
    )


def differences(ours: Sequence[Told], theirs: Sequence[Told]) -> list[str]:
    """Turns whose reply is not the same, token for token."""
    return [
        f"{mine.turn.question.text} {mine.heard.reply!r} against {other.heard.reply!r}"
        for mine, other in zip(ours, theirs, strict=True)
        if mine.heard.token_ids != other.heard.token_ids
    ]


def pull(mac: Mac, agent: str) -> cachestore_pb2.SnapshotVersion:
    """Copy an agent from the first Mac."""
    with mac.store_client() as store:
        return store.pull_agent("first", agent)


def says_not_told(told: Told) -> bool:
    """Whether the agent said that it was not told, and did not say the secret."""
    return "not told" in told.heard.reply and not told.is_right
