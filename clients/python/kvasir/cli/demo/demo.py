"""`kvasir demo`: two agents live, both services die by kill -9, the agents go on; then one moves to another Mac."""

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
from kvasir.cli.demo.script import Story, told_story
from kvasir.cli.failures import PROBLEMS, WrongUsage
from kvasir.cli.rows import size
from kvasir.cli.running.checks import check_installed
from kvasir.cli.showing.arguments import option
from kvasir.cli.showing.tables import table
from kvasir.cli.talking.turn import TurnResult
from kvasir.errors import Internal
from kvasir.syncing import SHORT_ROOT, Scratch


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
        str, option("A directory or name of an mlx-lm model, whose answers are shown and not judged.")
    ] = "",
    out: Annotated[Path, option("The directory of the picture.", file_okay=False)] = Path("out"),
    quick: Annotated[bool, option("Shorter lives; the same steps.", "--quick")] = False,
    agent: Annotated[
        bool,
        option(
            f"Instead, kill a coding agent with {coding_agent.INSTRUCTION_TOKENS:,} tokens of instructions, which "
            "continues without computing them again. Minutes without a GPU; --quick takes "
            f"{coding_agent.QUICK_TOKENS:,}.",
            "--agent",
        ),
    ] = False,
) -> None:
    """Show two agents that survive kill -9, and one that moves. It checks every claim.

    --json: claims (a list: text, holds, found) and seconds, on standard output."""
    check_installed("store", "engine")
    if model and agent:
        raise WrongUsage("--agent has a model of its own: expected no --model", field="--model")
    began = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)  # two minutes later is too late to hear that it cannot be
    scratch = Scratch("kvasir-demo-", SHORT_ROOT)
    root = scratch.path
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
        if not is_done:
            scratch.keep()
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
        result = answered.result
        note = f"{result.cached_tokens} of {result.prompt_tokens} cached, {result.source}, {result.first_token_s:.2f} s"
        self.out.print(f"  {answered.turn.question.text}", style="cyan")
        self.out.print(f"    {result.reply.strip()}", end="  ")
        self.out.print(note if answered.is_right else f"{note}; expected: {answered.turn.question.answer}", style="dim")


def _play(show: Show, make: Callable[..., Mac], length: Size, out: Path) -> None:
    one, two = (told_story(*each) for each in zip(length.seeds, length.tokens, length.turns, strict=True))
    mac = _started(show, make("first", is_shared=True), "starting a store and an engine")
    lives = [_live(show, mac, one, length.fork_after), _live(show, mac, two, ())]
    _check_lives(show, lives, length)
    later = _die_and_go_on(show, mac, lives)
    with show.caller.busy("timing warm and hot turns"):
        warm_and_hot = [_best_of_forks(mac, one, turns) for turns in length.fork_after]
    control = _started(show, make("control"), "starting a store and an engine that will not be killed")
    with show.caller.busy("timing cold turns"):
        question = one.ask(2).messages
        cold = [control.say("", [*lives[0].messages(turns), *question], is_new=True) for turns in length.fork_after]
    _compare(show, control, lives, later)
    control.stop()
    timings = [Timing(cold, *others) for cold, others in zip(cold, warm_and_hot, strict=True)]
    _check_timings(show, timings)
    _sizes(show, mac, lives)
    _move(show, mac, make("another"), lives[0])
    _keep_a_secret(show, mac, one, two)
    _picture(show, mac, timings, out)


def _started(show: Show, mac: Mac, doing: str) -> Mac:
    with show.caller.busy(doing):
        steps.start(mac)
    return mac


def _live(show: Show, mac: Mac, story: Story, fork_after: tuple[int, ...]) -> Life:
    show.title(f"{story.agent} lives through {len(story.turns)} turns; each brings news and ends with a question")
    with show.caller.busy(f"{story.agent} listens"):
        return steps.live(mac, story, fork_after, show.print_answer)


def _check_lives(show: Show, lives: list[Life], length: Size) -> None:
    check, (one, two) = show.claims.check, lives
    answered = [each for life in lives for each in life.answered]
    is_durable = all(each.result.is_durable for each in answered)
    check("every turn was durable before its reply was called finished", is_durable)
    is_hot = all(each.result.source == "hot" for life in lives for each in life.answered[1:])
    check("from the second turn on, agents were read from the engine's memory, not computed again", is_hot)
    enough = 4000 if length is FULL and show.judges else 0
    told = f"{one.story.agent} remembers {one.tokens} tokens, {two.story.agent} {two.tokens}"
    check(told, one.tokens >= enough)
    if show.judges:
        right = sum(each.is_right for each in answered)
        check("at least nine of ten answers were right", right >= 0.9 * len(answered), f"{right} of {len(answered)}")


def _die_and_go_on(show: Show, mac: Mac, lives: list[Life]) -> list[AnsweredTurn]:
    two = lives[1].story
    show.title(f"kill -9 for both services, in the middle of a turn of {two.agent}")
    with show.caller.busy("killing"):
        error = steps.die_in_a_turn(mac, two.agent, two.turns[0].messages)
    if error is None:
        raise Internal("the turn ended before the kill; nothing was shown")
    show.say(f"  its client gets: {error.message}")
    is_told = error.metadata.get("remembered_version") == str(lives[1].answered[-1].result.stored.version)
    show.claims.check("the broken turn's error names the version that is kept", is_told)
    with show.caller.busy("starting both again"):
        seconds = steps.start(mac)
    show.title(f"Both run again after {seconds:.1f} s; the agents answer questions about facts from before")
    later = [_gone_on(show, mac, life) for life in lives]
    if show.judges:
        show.claims.check("both answered right", all(answered.is_right for answered in later))
    return later


def _gone_on(show: Show, mac: Mac, life: Life) -> AnsweredTurn:
    answered = steps.answer(mac, life.story.agent, life.story.later[0])
    result = answered.result
    show.claims.check(
        f"{life.story.agent} goes on from the store",
        result.source == "warm" and result.cached_tokens >= life.tokens - 1,
        f"{result.cached_tokens} of {result.prompt_tokens} prompt tokens were not computed again",
    )
    show.print_answer(answered)
    return answered


def _best_of_forks(mac: Mac, story: Story, turns: int) -> tuple[TurnResult, TurnResult]:
    """The best warm turn after so many turns, and the best hot turn right after one."""
    names = steps.forks(story.agent, turns)
    pairs = [[mac.say(name, story.ask(number).messages) for number in (2, 3)] for name in names]
    warm, hot = (min(each, key=lambda result: result.first_token_s) for each in zip(*pairs, strict=True))
    return warm, hot


def _compare(show: Show, control: Mac, lives: list[Life], later: list[AnsweredTurn]) -> None:
    show.title("The same lives in an engine that was never killed")
    with show.caller.busy("both agents live again, without a kill"):
        unbroken = [steps.live(control, life.story) for life in lives]
        after = [steps.answer(control, life.story.agent, life.story.later[0]) for life in lives]
    ours = [each for life in lives for each in life.answered] + later
    theirs = [each for life in unbroken for each in life.answered] + after
    different = [
        f"{mine.turn.question.text} {mine.result.reply!r} against {other.result.reply!r}"
        for mine, other in zip(ours, theirs, strict=True)
        if mine.result.token_ids != other.result.token_ids
    ]
    for text in different:
        show.say(f"  {text}")
    tokens = sum(len(answered.result.token_ids) for answered in ours)
    show.claims.check(
        "token for token, the answers before and after the kill are those of a run without one",
        not different,
        f"{len(ours)} answers, {tokens} tokens",
    )
    computed, others = ([each.result.computed_prompt_tokens for each in turns] for turns in (later, after))
    show.claims.check(
        "after the restart nothing but the question was computed; without one neither", computed == others
    )


def _check_timings(show: Show, timings: list[Timing]) -> None:
    """Show them; check that the sources are those of the table, and that warm is much faster than cold."""
    show.title("Time to the first token, and tokens that were not computed again")
    columns = ("context", "cold", "warm (store)", "hot (engine)", "cached: cold", "warm", "hot")

    def row(each: Timing) -> tuple[object, ...]:
        cached = (turn.cached_tokens for turn in (each.cold, each.warm, each.hot))
        return each.tokens, *(f"{seconds:.3f} s" for seconds in each.first_token_s), *cached

    show.out.print(table(columns, map(row, timings), numbers=columns))
    show.claims.check(
        "cold turns computed everything, warm ones came from the store, hot ones from the engine",
        all((each.cold.source, each.warm.source, each.hot.source) == ("cold", "warm", "hot") for each in timings)
        and not any(each.cold.cached_tokens for each in timings),
    )
    longest = timings[-1]
    ratio = longest.warm.first_token_s / longest.cold.first_token_s
    text = f"at {longest.tokens} tokens, from the store takes at most a fifth of the time"
    show.claims.check(text, ratio <= 0.2, f"{ratio:.3f} of it")


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
        f"the store's files are those of its index: {stats.agent_count} agents and {stats.snapshot_count} versions",
        on_disk == stats.blob_bytes,
        f"{size(on_disk)} on disk, {size(stats.logical_bytes)} if nothing were shared",
    )


def _move(show: Show, mac: Mac, another: Mac, life: Life) -> None:
    agent, question = life.story.agent, life.story.later[1]
    show.title(f"{agent} is pulled into another store with its own engine: another Mac")
    another.knows_peer("first", mac)
    _started(show, another, "starting the other store and engine")
    with show.caller.busy(f"pulling {agent}"), another.store_client() as store:
        began = time.monotonic()
        snapshot = store.pull_agent("first", agent)
        seconds = time.monotonic() - began
    there, here = (steps.answer(each, agent, question) for each in (another, mac))
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
    knows, asked = (steps.answer(mac, each.agent, secret) for each in (one, two))
    reply = asked.result.reply
    show.say(f"  {one.agent}:")
    show.print_answer(knows)
    show.say(f"  {two.agent}:\n    {reply.strip()}")
    if show.judges:
        show.claims.check(f"{one.agent} knows it", knows.is_right)
        show.claims.check(f"{two.agent} says that it was not told", "not told" in reply and not asked.is_right)
    else:
        show.claims.check(f"{two.agent} does not reveal it", not asked.is_right)


def _picture(show: Show, mac: Mac, timings: list[Timing], out: Path) -> None:
    capabilities, model = mac.engine_facts()
    path = out / "demo.png"
    computed_by = f"{capabilities.device} {capabilities.blas}".strip()
    plot(timings, path, f"{model.name}, {model.compute_type} on {computed_by}; 4-bit KV; best of three; one run")
    show.claims.check(f"{path} shows the three times", path.read_bytes().startswith(b"\x89PNG"))
    if capabilities.device == "cpu" and not capabilities.blas:
        remedy = "`apt install libopenblas0-pthread` or `pip install mkl` makes this faster."
        show.say(f"There is no optimized BLAS: {remedy}")
