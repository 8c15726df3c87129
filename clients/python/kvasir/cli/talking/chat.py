"""`kvasir chat`: talk with an agent in a terminal or through a pipe. The agent remembers earlier calls."""

import contextlib
import math
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Annotated, TypeVar

import typer

from kvasir.cachestore.v1 import cachestore_pb2
from kvasir.cli import failures
from kvasir.cli.agents import MOST_VERSION, complete_agent, store_client
from kvasir.cli.caller import Caller
from kvasir.cli.failures import WrongUsage
from kvasir.cli.rows import fields_of, origin, size
from kvasir.cli.running.holding import is_led
from kvasir.cli.showing import terminal
from kvasir.cli.showing.arguments import argument, option
from kvasir.cli.showing.tables import pairs
from kvasir.cli.talking.interrupts import interrupt_prompts
from kvasir.cli.talking.turn import TurnResult, follow_turn
from kvasir.clients import GenerateOptions, InferenceClient, StoreClient, message
from kvasir.common.v1 import message_pb2
from kvasir.errors import Conflict, DeadlineExceeded, KvasirError, Unavailable
from kvasir.formats import manifest as manifests
from kvasir.inference.v1 import inference_pb2
from kvasir.on_full import OnFullPolicy
from kvasir.waits import ANSWER_S, PATIENCE_S, RETRY_S, WORK_S

_T = TypeVar("_T")
_QUOTES = 3 * '"'  # around several lines that are one text
_HELP = (
    "/memory shows what the agent remembers; /fork NAME goes on as a new agent with the same memory; "
    f"/rollback N goes back to version N; /quit leaves; {_QUOTES} begins and ends several lines; Ctrl-C ends a reply"
)
# From this share of the context on, the prompt shows how full the memory is.
_NEARLY_FULL = 0.8


@dataclass(frozen=True)
class ChatOptions:
    """How the agent is addressed, and how it replies."""

    system: Annotated[str, option("The system message of a new agent.")] = ""
    max_tokens: Annotated[int, option("Longest reply.", min=1, max=1 << 24)] = 512
    on_full: Annotated[
        OnFullPolicy | None,
        option("What to do when the memory is full. Default: as the agent's label kvasir.on_full says."),
    ] = None
    temperature: Annotated[
        float | None, option("0 is greedy. Default: as in the model's own files, else 0.", min=0, max=2)
    ] = None
    think: Annotated[
        str | None,
        option(
            "on, off, or the most tokens of thoughts. Default: as in the model's template.", metavar="on|off|TOKENS"
        ),
    ] = None

    def of_turn(self) -> GenerateOptions:
        """Raises WrongUsage."""
        sampling, thinking = inference_pb2.Sampling(temperature=self.temperature), _thinking(self.think)
        # What came before Ctrl-C is what a person has read.
        options = GenerateOptions(max_tokens=self.max_tokens, sampling=sampling, thinking=thinking, keep_partial=True)
        if self.on_full is not None:
            setting = inference_pb2.OnFull(policy=getattr(inference_pb2, f"ON_FULL_POLICY_{self.on_full.name}"))
            options = replace(options, on_full=setting)
        return options


def chat(
    caller: Caller,
    options: ChatOptions,
    agent: Annotated[str, argument("The agent's name.", "AGENT", autocompletion=complete_agent)] = "me",
    once: Annotated[
        str | None,
        option(
            "Send this message, print the reply, and end: with 1 if the turn was not stored. -: read it from "
            "standard input.",
            metavar="TEXT",
        ),
    ] = None,
    within: Annotated[
        float | None,
        option("With --once: give up after this many seconds, and end with 3.", min=0.1, metavar="SECONDS"),
    ] = None,
) -> None:
    """Talk with an agent, which remembers. Reads lines from a pipe too; --json prints one object per reply."""
    text = sys.stdin.read().strip() if once == "-" else once
    if once is not None and not (text or "").strip():
        raise failures.WrongUsage.of("--once", "the message is empty")
    if not agent:
        raise failures.WrongUsage.of("AGENT", "the name is empty")
    if within is not None and once is None:
        raise failures.WrongUsage.of("--within", "it limits one turn: use it with --once")
    of_turn = options.of_turn()
    patience_s = min(within or PATIENCE_S, PATIENCE_S)
    with caller.engine.engine_client(patience_s) as engine, failures.naming("engine", caller):
        ends_s = math.inf if within is None else time.monotonic() + within
        conversation = Conversation(caller, engine, agent, options.system, of_turn, ends_s)
        conversation.meet()
        if text is None:
            conversation.run()
        elif conversation.say(text).stored.state == "failed":
            raise typer.Exit(failures.PROBLEMS)


def _thinking(asked: str | None) -> inference_pb2.Thinking | None:
    if asked in ("on", "off"):
        mode = inference_pb2.THINKING_MODE_ON if asked == "on" else inference_pb2.THINKING_MODE_OFF
        return inference_pb2.Thinking(mode=mode)
    if asked is None:
        return None
    if not (asked.isascii() and asked.isdigit() and len(asked) < 10):
        raise failures.WrongUsage.of("--think", "expected on, off or a number of tokens")
    return inference_pb2.Thinking(budget_tokens=int(asked))


@dataclass
class Conversation:
    """A person (or a pipe) and an agent."""

    caller: Caller
    engine: InferenceClient
    agent: str
    system: str
    options: GenerateOptions
    ends_s: float = math.inf  # by time.monotonic: then nothing is waited for any more
    _newest: TurnResult | None = None  # the last turn
    _reply: terminal.WrappedReply = field(default_factory=terminal.WrappedReply)

    def meet(self) -> None:
        """Find the engine, and wait for one that is starting. Shows the agent's name to a person."""
        models = self._patiently(self.engine.list_models)
        if sys.stdin.isatty():
            self.caller.say(f"You talk with {self.agent}. {_HELP}.")
            if [each.name for each in models if each.state == inference_pb2.MODEL_STATE_LOADED] == ["kvasir-tiny"]:
                about = "it remembers what you tell it, and knows little"
                self.caller.say(f"kvasir-tiny is small, to try Kvasir with: {about}.")

    def run(self) -> None:
        """Read until the input ends or /quit. A refusal ends a pipe; at a terminal the talk goes on after it."""
        is_person = sys.stdin.isatty()
        for text in texts(lambda: f"{self.agent}> ", self.caller.say):
            try:
                if text == "/quit":
                    return
                if text.startswith("/"):
                    self.command(text)
                else:
                    self.say(text)
            except KvasirError as error:
                if not is_person:
                    raise
                failures.report(error, self.caller)
            except KeyboardInterrupt:
                if not is_person:
                    raise
                sys.stdout.write("\n")
                self.caller.say("stopped; the agent remembers its reply so far")

    def say(self, text: str) -> TurnResult:
        asked, self._reply = message("user", text), terminal.WrappedReply()
        self._newest = result = self._begun(asked) if self.system else self._run_turn(append=[asked])
        self._show_reuse(result)
        self.system = ""
        return result

    def _begun(self, asked: message_pb2.Message) -> TurnResult:
        """The first turn of a new agent, with its system message."""
        try:
            # Version 0: an agent that remembers other things is not overwritten.
            return self._run_turn(whole=[message("system", self.system), asked])
        except Conflict:
            self.caller.say(f"{self.agent} is no new agent: --system is not used")
            return self._run_turn(append=[asked])

    def _run_turn(
        self, *, append: list[message_pb2.Message] | None = None, whole: list[message_pb2.Message] | None = None
    ) -> TurnResult:
        # Sent again with the same id after a break, the turn is not done twice.
        options = replace(self.options, request_id=str(uuid.uuid4()))

        def turn() -> TurnResult:
            events = self.engine.generate(
                append_messages=append,
                messages=whole,
                options=options,
                agent_id=self.agent,
                expected_version=None if whole is None else 0,
                timeout_s=None if self.ends_s == math.inf else max(0.0, self.ends_s - time.monotonic()),
            )
            with contextlib.closing(events), self._within_its_time():
                return follow_turn(
                    events, on_progress=self._show_progress, on_text=self._write, on_reasoning=self._write_dimly
                )

        return self._patiently(turn)

    @contextlib.contextmanager
    def _within_its_time(self) -> Iterator[None]:
        """An engine that answered before is not silent: the turn took longer than --within."""
        try:
            yield
        except DeadlineExceeded as error:
            if error.reason != DeadlineExceeded.reason:  # the engine's own, as for a reader that was stopped
                raise
            text = "--within: the reply did not end in this time"
            raise DeadlineExceeded(text, field="--within", reason="TURN_TOO_SLOW", metadata=error.metadata) from None

    def _patiently(self, call: Callable[[], _T]) -> _T:
        """The call's result. An engine that is being started again is waited for."""
        began = 0.0
        while True:
            try:
                return call()
            except Unavailable as error:
                if not began:
                    if not self._comes_back(error):
                        raise
                    began = time.monotonic()
                    what = "the engine is away" if error.reason == Unavailable.reason else error.message
                    self.caller.say(f"\n{what}; waiting, to retry …")
                if time.monotonic() > min(began + WORK_S, self.ends_s) or not self._comes_back(error):
                    raise
                time.sleep(min(error.retry_after_s or RETRY_S, ANSWER_S))

    def _comes_back(self, error: Unavailable) -> bool:
        """Whether a refusal passes: the engine reports it, or it is the home's and its `kvasir up` starts it again."""
        is_homes = self.caller.engine.address == self.caller.home.endpoint("engine").address
        return error.retry_after_s is not None or (is_homes and is_led(self.caller.home))

    def _write(self, text: str) -> None:
        if not self.caller.as_json:
            self._reply.write(text)

    def _write_dimly(self, text: str) -> None:
        """Show the model's reasoning to people. A pipe gets answers alone."""
        if sys.stdout.isatty() and not self.caller.as_json:
            self._reply.write(text, is_dim=True)

    def _show_progress(self, progress: inference_pb2.PrefillProgress) -> None:
        if self.caller.shows_progress:
            line = f"\rreading {progress.tokens_done} of {progress.tokens_total} tokens"
            sys.stderr.write(line if progress.tokens_done < progress.tokens_total else "\r\x1b[2K")
            sys.stderr.flush()

    def _show_reuse(self, result: TurnResult) -> None:
        """Show what the turn reused, in a dim colour. A script gets the whole turn as one line of JSON."""
        if self.caller.as_json:
            tokens = ("reply", "source", "prompt_tokens", "cached_tokens", "completion_tokens")
            took = {"first_token_s": round(result.first_token_s, 6)}
            stored = {"version": result.stored.version, "snapshot": result.stored.state}
            memory = {**fields_of(result, "memory_tokens", "context_tokens"), "left_out_messages": result.left_out}
            parted = {"kept": list(result.kept), "parted": result.parted}
            said = {"agent_id": self.agent, **fields_of(result, *tokens)}
            self.caller.line({**said, **took, **stored, **memory, **parted})
            return
        sys.stdout.write("\n")
        sys.stdout.flush()
        kept = f"version {result.stored.version}" if result.is_durable else _not_durable(result)
        why = f": {result.reason}" if result.source == "cold" and result.reason else ""
        self.caller.err.print(
            f"{result.cached_tokens} of {result.prompt_tokens} tokens cached ({result.source}{why}), "
            f"first token after {result.first_token_s * 1000:.0f} ms, {kept}",
            style="dim",
        )
        if reuse := _reuse_words(result):
            self.caller.err.print(reuse, style="dim")
        self._warn_when_full(result)

    def _warn_when_full(self, result: TurnResult) -> None:
        share = result.memory_tokens / result.context_tokens if result.context_tokens else 0.0
        if result.left_out:
            self.caller.say(f"the memory is full: oldest messages left out from now on: {result.left_out}")
        elif share >= _NEARLY_FULL:
            remedy = "chat --on-full drop_oldest or summarize goes on after that"
            self.caller.say(f"the memory is {share:.0%} full; {remedy}")

    def command(self, line: str) -> None:
        """What a line with a slash requests."""
        name, _, argument = line.partition(" ")
        argument = argument.strip()
        if name == "/memory":
            self._show_memory()
        elif name == "/fork" and argument:
            self.engine.fork_agent(self.agent, argument)
            self.agent = argument
            self.caller.say(f"You talk with {argument} now, which remembers the same.")
        elif name == "/rollback" and argument.isdecimal() and len(argument) < len(str(MOST_VERSION)):
            with store_client(self.caller) as store:
                made = store.rollback_agent(self.agent, int(argument))
            self.caller.say(f"{self.agent} is at version {made.version}, which is version {argument} again.")
        elif name == "/rollback":
            with store_client(self.caller) as store:
                newest, _ = store.get_snapshot(self.agent)
                self.caller.say(f"/rollback N, of {_versions(store, newest)}")
        else:
            self.caller.say(_HELP)

    def _show_memory(self) -> None:
        with store_client(self.caller) as store:
            newest, manifest_bytes = store.get_snapshot(self.agent)
            versions = _versions(store, newest)
        manifest = manifests.parse(manifest_bytes)
        told = ((said.name or said.role, manifests.without_guards(said.content)) for said in manifest.messages)
        self.caller.err.print(pairs(told, justify="left"))
        self.caller.say(f"{newest.token_count} tokens, {size(newest.total_bytes)}; {versions}")
        if self._newest is not None and (reuse := _reuse_words(self._newest)):
            self.caller.say(f"the last prompt: {reuse}")


def _reuse_words(result: TurnResult) -> str:
    """What the prompt had of the memory by rules, and where it parted from it."""
    kept = f"kept as the memory has it: {', '.join(result.kept)}" if result.kept else ""
    return "; ".join(each for each in (kept, result.parted) if each)


def _not_durable(result: TurnResult) -> str:
    state = "not stored yet" if result.stored.state == "pending" else "not stored"
    return f"{state}: {result.stored.reason}" if result.stored.reason else state


def _versions(store: StoreClient, newest: cachestore_pb2.SnapshotVersion) -> str:
    """Those of its line: of another model's line none is meant."""
    snapshots = store.list_snapshots(newest.agent_id, newest.kv_identity_hash).snapshots
    return "versions: " + ", ".join(f"{each.version} ({origin(each.origin)})" for each in reversed(snapshots))


def texts(prompt: Callable[[], str], say: Callable[[str], None]) -> Iterator[str]:
    """Each text, without empty ones, until the input ends. `prompt` is called before each line of a person.

    At a prompt the first Ctrl-C drops what was typed and shows how to leave; the second, in a row, leaves."""
    is_person = sys.stdin.isatty()
    if is_person:
        _load_line_editing()
        interrupt_prompts()
    was_interrupted = False
    while True:
        try:
            text = _text(prompt() if is_person else "", "... " if is_person else "")
        except EOFError:
            if is_person:
                sys.stdout.write("\n")  # the shell's prompt has a line of its own
            return
        except KeyboardInterrupt:
            if is_person:
                sys.stdout.write("\n")
            if was_interrupted or not is_person:
                raise
            was_interrupted = True
            say("Ctrl-C once more, Ctrl-D or /quit leaves.")
            continue
        was_interrupted = False
        if text:
            yield text


def _text(prompt: str, continued: str) -> str:
    line = input(prompt).strip()
    if not line.startswith(_QUOTES):
        return line
    lines = [line.removeprefix(_QUOTES)]
    try:
        while not lines[-1].endswith(_QUOTES):
            lines.append(input(continued).rstrip())
    except EOFError:
        raise WrongUsage(f"the input ends before the {_QUOTES} that ends a text; the text is not sent") from None
    lines[-1] = lines[-1].removesuffix(_QUOTES)
    return "\n".join(lines).strip()


def _load_line_editing() -> None:
    """Load arrow keys and history for `input`, where Python was built with them."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  importing it is what it is for
