"""`kvasir demo`: two agents live, both services die by kill -9, the agents go on; then one moves to another Mac."""

import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvasir.cli.caller import Caller
from kvasir.cli.demo import coding_agent
from kvasir.cli.demo import run as steps
from kvasir.cli.demo.mac import Mac, macs
from kvasir.cli.demo.plot import Timing, plot
from kvasir.cli.demo.run import AnsweredTurn, Claims, Life
from kvasir.cli.demo.script import Story, ask, told_story
from kvasir.cli.failures import PROBLEMS, WrongUsage
from kvasir.cli.rows import size
from kvasir.cli.running.checks import check_installed
from kvasir.cli.showing.tables import table
from kvasir.errors import Internal


@dataclass(frozen=True, slots=True)
class Size:
    """How long the agents live. Seeds are of kvasir-tiny's world, of which the model saw none in training."""

    seeds: tuple[int, int]
    tokens: tuple[int, int]
    turns: tuple[int, int]
    fork_after: tuple[int, ...]


FULL = Size(seeds=(8, 12), tokens=(4400, 2200), turns=(8, 4), fork_after=(2, 4, 6, 8))
QUICK = Size(seeds=(15, 12), tokens=(1100, 500), turns=(2, 1), fork_after=(1, 2))


def demo(
    caller: Caller,
    model: Annotated[
        str, typer.Option(help="A directory or name of an mlx-lm model, whose answers are shown and not judged.")
    ] = "",
    out: Annotated[Path, typer.Option(help="Where the picture goes.", file_okay=False)] = Path("out"),
    quick: Annotated[bool, typer.Option("--quick", help="Shorter lives; the same steps.")] = False,
    agent: Annotated[
        bool,
        typer.Option(
            "--agent",
            help=f"Instead: a coding agent with {coding_agent.INSTRUCTION_TOKENS:,} tokens of instructions is killed, "
            "and goes on without computing them again. Minutes without a GPU; --quick takes "
            f"{coding_agent.QUICK_TOKENS:,}.",
        ),
    ] = False,
) -> None:
    """Two agents live, die by kill -9, and go on; then one moves. Every claim is checked.

    --json: claims (a list: text, holds, found) and seconds, on standard output."""
    check_installed("store", "engine")
    if model and agent:
        raise WrongUsage("--agent has a model of its own: expected no --model", field="--model")
    began = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)  # two minutes later is too late to hear that it cannot be
    # Short, and not the system's own choice: a socket's path must fit into a hundred bytes.
    root = Path(tempfile.mkdtemp(prefix="kvasir-", dir="/tmp"))
    show = Show(caller, judges=not model)
    is_done = False
    try:
        with macs(root) as make:
            if agent:
                tokens = coding_agent.QUICK_TOKENS if quick else coding_agent.INSTRUCTION_TOKENS
                coding_agent.play(show.say, show.claims, make, root, tokens)
            else:
                _play(show, partial(make, model=model), QUICK if quick else FULL, out)
            if show.claims.broken:
                show.say(f"\n{len(show.claims.broken)} of {len(show.claims.made)} claims are not true.")
                raise typer.Exit(PROBLEMS)
        is_done = not show.claims.broken
    finally:
        if is_done:
            shutil.rmtree(root)
        else:
            caller.note(f"Data and logs are kept in {root}")
        if caller.as_json:
            claims = [asdict(claim) for claim in show.claims.made]
            caller.line({"claims": claims, "seconds": round(time.monotonic() - began, 1)})
    show.say(f"\n{len(show.claims.made)} claims, all checked and true, in {time.monotonic() - began:.0f} s.")


@dataclass
class Show:
    """The demo's output for people."""

    caller: Caller
    judges: bool  # answers: the stories are of the shipped model's world
    claims: Claims = field(init=False)

    def __post_init__(self) -> None:
        self.claims = Claims(self.out)

    @property
    def out(self) -> Console:
        return self.caller.err if self.caller.as_json else self.caller.out

    def title(self, text: str) -> None:
        self.out.print(f"\n{text}", style="bold")

    def say(self, text: str) -> None:
        self.out.print(text)

    def print_answer(self, answered: AnsweredTurn) -> None:
        """Print one question and its answer."""
        result = answered.result
        note = f"{result.cached_tokens} of {result.prompt_tokens} cached, {result.source}, {result.first_token_s:.2f} s"
        self.out.print(f"  {answered.turn.question.text}", style="cyan")
        self.out.print(f"    {result.reply.strip()}", end="  ")
        self.out.print(note if answered.is_right else f"{note}; expected: {answered.turn.question.answer}", style="dim")


def _play(show: Show, make: Callable[..., Mac], length: Size, out: Path) -> None:
    stories = [
        told_story(seed, tokens, turns)
        for seed, tokens, turns in zip(length.seeds, length.tokens, length.turns, strict=True)
    ]
    one, two = stories
    mac = make("first", is_shared=True)
    with show.caller.busy("starting a store and an engine"):
        mac.start()
        steps.warm_up(mac)
    lives = [_live(show, mac, story, length.fork_after if story is one else ()) for story in stories]
    _check_lives(show, lives, length)
    later = _die_and_go_on(show, mac, lives)
    with show.caller.busy("timing warm and hot turns"):
        warm_and_hot = steps.time_forks(mac, lives[0])
    control = make("control")
    with show.caller.busy("starting a store and an engine that will not be killed"):
        control.start()
        steps.warm_up(control)
    with show.caller.busy("timing cold turns"):
        cold = steps.time_cold(control, lives[0])
    _compare(show, control, lives, later)
    control.stop()
    timings = [Timing(cold, *others) for cold, others in zip(cold, warm_and_hot, strict=True)]
    _table(show, timings)
    steps.check_timings(show.claims, timings)
    _sizes(show, mac, lives)
    _move(show, mac, make("another"), lives[0])
    _keep_a_secret(show, mac, one, two)
    _picture(show, mac, timings, out)


def _live(show: Show, mac: Mac, story: Story, fork_after: tuple[int, ...]) -> Life:
    show.title(f"{story.agent} lives through {len(story.turns)} turns; each brings news and ends with a question")
    with show.caller.busy(f"{story.agent} listens"):
        return steps.live(mac, story, fork_after=fork_after, on_answer=show.print_answer)


def _check_lives(show: Show, lives: list[Life], length: Size) -> None:
    answered = [each for life in lives for each in life.answered]
    right = sum(each.is_right for each in answered)
    show.claims.check(
        "every turn was durable before its reply was called finished", all(each.result.is_durable for each in answered)
    )
    show.claims.check(
        "from the second turn on, agents were read from the engine's memory, not computed again",
        all(each.result.source == "hot" for life in lives for each in life.answered[1:]),
    )
    enough = 4000 if length is FULL and show.judges else 0
    show.claims.check(
        f"{lives[0].story.agent} remembers {lives[0].tokens} tokens, {lives[1].story.agent} {lives[1].tokens}",
        lives[0].tokens >= enough,
    )
    if show.judges:
        text = "at least nine of ten answers were right"
        show.claims.check(text, right >= 0.9 * len(answered), f"{right} of {len(answered)}")


def _die_and_go_on(show: Show, mac: Mac, lives: list[Life]) -> list[AnsweredTurn]:
    two = lives[1].story
    show.title(f"kill -9 for both services, in the middle of a turn of {two.agent}")
    with show.caller.busy("killing"):
        error = steps.die_in_a_turn(mac, two.agent, two.turns[0].messages)
    kept = str(lives[1].answered[-1].result.stored.version)
    if error is None:
        raise Internal("the turn ended before the kill; nothing was shown")
    show.say(f"  its client gets: {error.message}")
    show.claims.check(
        "the broken turn's error says which version is kept", error.metadata.get("remembered_version") == kept
    )
    with show.caller.busy("starting both again"):
        seconds = mac.start()
        steps.warm_up(mac)
    show.title(f"Both run again after {seconds:.1f} s; the agents are asked about facts from before")
    later = []
    for life in lives:
        answered = steps.go_on(mac, life.story, show.claims, life, life.story.later[0])
        show.print_answer(answered)
        later.append(answered)
    if show.judges:
        show.claims.check("both answered right", all(answered.is_right for answered in later))
    return later


def _compare(show: Show, control: Mac, lives: list[Life], later: list[AnsweredTurn]) -> None:
    show.title("The same lives in an engine that was never killed")
    with show.caller.busy("both agents live again, without a kill"):
        unbroken = [steps.live(control, life.story) for life in lives]
        after = [
            AnsweredTurn(answered.turn, control.say(life.story.agent, answered.turn.messages))
            for life, answered in zip(lives, later, strict=True)
        ]
    ours = [each for life in lives for each in life.answered] + later
    theirs = [each for life in unbroken for each in life.answered] + after
    different = steps.differences(ours, theirs)
    for text in different:
        show.say(f"  {text}")
    tokens = sum(len(answered.result.token_ids) for answered in ours)
    show.claims.check(
        "token for token, the answers before and after the kill are those of a run without one",
        not different,
        f"{len(ours)} answers, {tokens} tokens",
    )
    show.claims.check(
        "after the restart nothing but the question was computed; without one neither",
        all(
            mine.result.computed_prompt_tokens == other.result.computed_prompt_tokens
            for mine, other in zip(later, after, strict=True)
        ),
    )


def _table(show: Show, timings: list[Timing]) -> None:
    show.title("Time to the first token, and tokens that were not computed again")
    columns = ("context", "cold", "warm (store)", "hot (engine)", "cached: cold", "warm", "hot")

    def row(each: Timing) -> tuple[object, ...]:
        cached = (turn.cached_tokens for turn in (each.cold, each.warm, each.hot))
        return each.tokens, *(f"{seconds:.3f} s" for seconds in each.first_token_s), *cached

    show.out.print(table(columns, map(row, timings), numbers=columns))


def _sizes(show: Show, mac: Mac, lives: list[Life]) -> None:
    _, model = mac.engine_facts()
    with mac.store_client() as store:
        stats = store.get_stats()
        newest = [store.get_snapshot(life.story.agent)[0] for life in lives]
    for life, snapshot in zip(lives, newest, strict=True):
        kv_bytes = snapshot.total_bytes - snapshot.manifest.size_bytes
        fp16_bytes = snapshot.token_count * model.kv_bytes_per_token_fp16
        show.claims.check(
            f"{life.story.agent}'s {snapshot.token_count} tokens of KV take at most 0.30 of their size at fp16",
            kv_bytes <= 0.30 * fp16_bytes,
            f"{size(kv_bytes)} instead of {size(fp16_bytes)}, {kv_bytes / fp16_bytes:.3f}",
        )
    on_disk = mac.stored_blob_bytes()
    show.claims.check(
        f"the store's files are what its index says: {stats.agent_count} agents and {stats.snapshot_count} versions",
        on_disk == stats.blob_bytes,
        f"{size(on_disk)} on disk, {size(stats.logical_bytes)} if nothing were shared",
    )


def _move(show: Show, mac: Mac, another: Mac, life: Life) -> None:
    agent = life.story.agent
    show.title(f"{agent} is pulled into another store with its own engine: another Mac")
    with show.caller.busy("starting the other store and engine"):
        another.knows_peer("first", mac)
        another.start()
        steps.warm_up(another)
    with show.caller.busy(f"pulling {agent}"):
        began = time.monotonic()
        snapshot = steps.pull(another, agent)
        seconds = time.monotonic() - began
    question = life.story.later[1]
    there = AnsweredTurn(ask(question), another.say(agent, ask(question).messages))
    here = AnsweredTurn(ask(question), mac.say(agent, ask(question).messages))
    show.print_answer(there)
    show.claims.check(
        f"{agent} answers there from what came over",
        (there.is_right or not show.judges) and there.result.source == "warm",
        f"{snapshot.token_count} tokens, {size(snapshot.total_bytes)} in {seconds:.2f} s",
    )
    show.claims.check("and says the same here, token for token", there.result.token_ids == here.result.token_ids)
    another.stop()


def _keep_a_secret(show: Show, mac: Mac, one: Story, two: Story) -> None:
    secret = one.secret
    if secret is None or secret.value in two.text:
        raise Internal("the stories are not fit: a secret that only the first agent is told is needed")
    show.title(f"{one.agent} was told a secret; {two.agent} was not")
    knows = AnsweredTurn(ask(secret), mac.say(one.agent, ask(secret).messages))
    asked = AnsweredTurn(ask(secret), mac.say(two.agent, ask(secret).messages))
    show.say(f"  {one.agent}:")
    show.print_answer(knows)
    show.say(f"  {two.agent}:")
    show.out.print(f"    {asked.result.reply.strip()}")
    if show.judges:
        show.claims.check(f"{one.agent} knows it", knows.is_right)
        show.claims.check(f"{two.agent} says that it was not told", steps.says_not_told(asked))
    else:
        show.claims.check(f"{two.agent} does not reveal it", not asked.is_right)


def _picture(show: Show, mac: Mac, timings: list[Timing], out: Path) -> None:
    capabilities, model = mac.engine_facts()
    path = out / "demo.png"
    computed_by = f"{capabilities.device} {capabilities.blas}".strip()
    plot(timings, path, f"{model.name}, {model.compute_type} on {computed_by}; 4-bit KV; best of three; one run")
    show.claims.check(f"{path} shows the three times", path.read_bytes().startswith(b"\x89PNG"))
    if capabilities.device == "cpu" and not capabilities.blas:
        show.say(
            "There is no optimized BLAS: `apt install libopenblas0-pthread` or `pip install mkl` makes this faster."
        )
