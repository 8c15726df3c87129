"""`kvasir chat`: talk with an agent in a terminal or through a pipe. The agent remembers earlier calls."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated

import typer
from rich.table import Table

from kvasir.cachestore.v1 import manifest_pb2
from kvasir.cli import failures
from kvasir.cli.agents import store_client
from kvasir.cli.caller import Caller, JsonOption, caller_of
from kvasir.cli.rows import origin, size
from kvasir.cli.talk import TurnResult, follow_turn
from kvasir.clients import GenerateOptions, InferenceClient
from kvasir.errors import FailedPrecondition, KvasirError
from kvasir.formats import manifest as manifests
from kvasir.inference.v1 import inference_pb2

_HELP = (
    "/memory shows what the agent remembers; /fork NAME goes on as a new agent with the same memory; "
    "/rollback N goes back to version N; /quit leaves"
)


def chat(
    context: typer.Context,
    agent: Annotated[str, typer.Argument(help="The agent's name.", metavar="[AGENT]")] = "me",
    system: Annotated[str, typer.Option(help="The system message of a new agent.")] = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest reply.")] = 512,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0 is greedy.")] = 0.0,
    as_json: JsonOption = False,
) -> None:
    """Talk with an agent, which remembers. Reads lines from a pipe too; --json prints one object per reply."""
    caller = caller_of(context, as_json)
    options = GenerateOptions(max_tokens=max_tokens, sampling={"temperature": temperature})
    endpoint = caller.engine
    engine = InferenceClient.connect(endpoint.address, token=endpoint.token(), tls=endpoint.tls)
    with engine, failures.naming("engine", caller):
        engine.get_capabilities()
        Conversation(caller, engine, agent, system, options).run()


@dataclass
class Conversation:
    """A person (or a pipe) and an agent."""

    caller: Caller
    engine: InferenceClient
    agent: str
    system: str
    options: GenerateOptions

    def run(self) -> None:
        """Read lines until the input ends or /quit. A refusal ends a pipe; at a terminal the talk goes on after it."""
        is_person = sys.stdin.isatty()
        if is_person:
            _load_line_editing()
            self.caller.say(f"You talk with {self.agent}. {_HELP}.")
        for line in _lines(self.agent if is_person else ""):
            try:
                if line == "/quit":
                    return
                if line.startswith("/"):
                    self._command(line)
                else:
                    self._turn(line)
            except KvasirError as error:
                if not is_person:
                    raise
                failures.report(error, self.caller)

    def _turn(self, text: str) -> None:
        message = manifest_pb2.Message(role="user", content=text)
        try:
            result = self._run_turn(append=[message])
        except FailedPrecondition as error:
            if error.reason != "NO_MESSAGES":
                raise
            # Nothing to append to. Version 0: an agent that remembers other things is not overwritten.
            first = [manifest_pb2.Message(role="system", content=self.system)] if self.system else []
            result = self._run_turn(whole=[*first, message])
        self._show_reuse(result)

    def _run_turn(
        self, *, append: list[manifest_pb2.Message] | None = None, whole: list[manifest_pb2.Message] | None = None
    ) -> TurnResult:
        events = self.engine.generate(
            append_messages=append,
            messages=whole,
            options=self.options,
            agent_id=self.agent,
            parent_version=None if whole is None else 0,
        )
        with contextlib.closing(events):
            return follow_turn(
                events, on_progress=self._on_progress(), on_text=self._write, on_reasoning=self._write_dimly
            )

    def _write(self, text: str) -> None:
        if not self.caller.as_json:
            sys.stdout.write(text)
            sys.stdout.flush()

    def _write_dimly(self, text: str) -> None:
        """Show the model's reasoning to people. A pipe gets answers alone."""
        if sys.stdout.isatty() and not self.caller.as_json:
            sys.stdout.write(f"\x1b[2m{text}\x1b[22m")
            sys.stdout.flush()

    def _on_progress(self) -> Callable[[inference_pb2.PrefillProgress], None]:
        def show(progress: inference_pb2.PrefillProgress) -> None:
            if self.caller.shows_progress and progress.tokens_done < progress.tokens_total:
                sys.stderr.write(f"\rreading {progress.tokens_done} of {progress.tokens_total} tokens")
            elif self.caller.shows_progress:
                sys.stderr.write("\r\x1b[2K")
            sys.stderr.flush()

        return show

    def _show_reuse(self, result: TurnResult) -> None:
        """Show dimly what the turn reused. A script gets the whole turn as one line of JSON."""
        if self.caller.as_json:
            self.caller.line(
                {
                    "agent_id": self.agent,
                    "reply": result.reply,
                    "source": result.source,
                    "prompt_tokens": result.prompt_tokens,
                    "cached_tokens": result.cached_tokens,
                    "completion_tokens": result.completion_tokens,
                    "first_token_s": round(result.first_token_s, 6),
                    "version": result.version,
                    "snapshot": result.snapshot_state,
                }
            )
            return
        sys.stdout.write("\n")
        sys.stdout.flush()
        kept = f"version {result.version}" if result.is_durable else f"{result.snapshot_state} {result.snapshot_reason}"
        source = f"{result.source}: {result.reason}" if result.source == "cold" else result.source
        self.caller.err.print(
            f"{result.cached_tokens} of {result.prompt_tokens} tokens cached ({source}), "
            f"first token after {result.first_token_s * 1000:.0f} ms, {kept.strip()}",
            style="dim",
            markup=False,
        )

    def _command(self, line: str) -> None:
        name, _, argument = line.partition(" ")
        argument = argument.strip()
        if name == "/memory":
            self._show_memory()
        elif name == "/fork" and argument:
            with store_client(self.caller) as store:
                store.fork_agent(self.agent, argument)
            self.agent = argument
            self.caller.say(f"You talk with {argument} now, which remembers the same.")
        elif name == "/rollback" and argument.isdecimal():
            with store_client(self.caller) as store:
                made = store.rollback_agent(self.agent, int(argument))
            self.caller.say(f"{self.agent} is at version {made.version}, which is version {argument} again.")
        else:
            self.caller.say(_HELP)

    def _show_memory(self) -> None:
        with store_client(self.caller) as store:
            versions = store.list_snapshots(self.agent).snapshots
            _, manifest_bytes = store.get_snapshot(self.agent)
        manifest = manifests.parse(manifest_bytes)
        table = Table(box=None, pad_edge=False, show_header=False)
        for message in manifest.messages:
            table.add_row(message.name or message.role, message.content)
        self.caller.err.print(table)
        newest = versions[0]
        self.caller.say(
            f"{newest.token_count} tokens, {size(newest.total_bytes)}; versions: "
            + ", ".join(f"{each.version} ({origin(each.origin)})" for each in reversed(versions))
        )


def _lines(prompt_of: str) -> Iterator[str]:
    """The lines that are typed or piped, without empty ones. With a name, a prompt is shown."""
    while True:
        try:
            line = input(f"{prompt_of}> " if prompt_of else "")
        except EOFError:
            return
        if line.strip():
            yield line.strip()


def _load_line_editing() -> None:
    """Load arrow keys and history for `input`, where Python was built with them."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  importing it is what it is for
