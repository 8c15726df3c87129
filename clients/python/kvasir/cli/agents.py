"""`kvasir agents …`: list, show, fork, roll back, delete, export and import their memories; see also `moving`."""

import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kvasir import expires_after, on_full, volatile
from kvasir.address import accepts
from kvasir.cachestore.v1 import cachestore_pb2 as pb
from kvasir.cli import carrying, failures
from kvasir.cli.caller import Caller, command, completing
from kvasir.cli.engine import engine_client
from kvasir.cli.rows import (
    agent_row,
    ago,
    counted,
    iso,
    labels_text,
    origin,
    owner_words,
    short,
    size,
    snapshot_row,
    to_the_second,
    until,
)
from kvasir.cli.showing.arguments import argument, option
from kvasir.cli.showing.tables import table
from kvasir.cli.showing.titles import LABEL as TITLE
from kvasir.cli.showing.titles import has_words, titles_of
from kvasir.cli.sleeping.temperatures import Temperature, engine_side, temperature, wakes_text
from kvasir.clients import InferenceClient, StoreClient
from kvasir.clients.archive_file import pieces_of
from kvasir.errors import KvasirError
from kvasir.formats.sealed_archive import Lock
from kvasir.names import UNNAMED_PREFIXES
from kvasir.waits import SOON_S


class Order(StrEnum):
    USED = "used"
    NAME = "name"
    SIZE = "size"


app = typer.Typer(help="Manage agents and their memories.", no_args_is_help=True)
_ORDERS: dict[Order, Callable[[pb.Agent], Any]] = {
    Order.USED: lambda agent: (-agent.used_at.ToNanoseconds(), agent.agent_id),
    Order.NAME: lambda agent: agent.agent_id,
    Order.SIZE: lambda agent: (-agent.lines[0].total_bytes if agent.lines else 0, agent.agent_id),
}
MOST_VERSION = (1 << 63) - 1  # of the contract's int64
_OWN = "kvasir."  # what Kvasir's labels begin with
_SETTINGS = {on_full.LABEL, expires_after.LABEL, volatile.LABEL}  # those of them that people set
_NUMBERS = ("version", "tokens", "bytes", "parent")  # columns
_COMPLETED = 100
_MOST_SEARCHED = 1000


def complete_agent(context: typer.Context, incomplete: str) -> list[str]:
    """Names of agents that begin so, for the shell; none when the store does not list them soon."""
    with suppress(KvasirError, ValueError, OSError), completing(context).store.store_client(SOON_S) as client:
        return [agent.agent_id for agent in client.list_agents(name_prefix=incomplete, page_size=_COMPLETED).agents]
    return []


def check_version(value: int | None) -> int | None:
    """The number, if the contract can carry it. A `max` of typer's would stand in every help."""
    if value is not None and value > MOST_VERSION:
        raise typer.BadParameter(f"{value} is larger than {MOST_VERSION}")
    return value


AgentArgument = Annotated[str, argument("The agent's name.", "AGENT", autocompletion=complete_agent)]
LineOption = Annotated[
    str,
    option("Hash of the line's KV identity. Default: the line that has the version.", "--kv-identity", metavar="HASH"),
]
VersionOption = Annotated[
    int | None, option("Default: the newest.", "--version", min=1, callback=check_version, metavar="N")
]

LabelOption = Annotated[list[str] | None, option("Only agents with this label; repeatable.", metavar="KEY=VALUE")]
FormOption = Annotated[
    carrying.Form,
    option("Kvasir's archive, or the single-file format of the design that Kvasir grew from.", "--format"),
]
KeyFileOption = Annotated[
    Path | None, option("The file of the master key (64 hex digits) that seals the file, in place of a passphrase.")
]
PassphraseFileOption = Annotated[
    Path | None, option("A file (0600) with the passphrase. Default: the command asks for it.")
]


@contextmanager
def store_client(caller: Caller) -> Iterator[StoreClient]:
    """A client of the caller's store. An error names the address that does not answer."""
    with caller.store.store_client() as client, failures.naming("store", caller):
        yield client


@contextmanager
def newest_client(caller: Caller) -> Iterator[InferenceClient | StoreClient]:
    """A client of the engine, which waits until an agent's newest turn is stored; of the store where none runs."""
    with engine_client(caller) if caller.is_engine_of_store and _answers(caller) else store_client(caller) as client:
        yield client


def _answers(caller: Caller) -> bool:
    try:
        with engine_client(caller) as engine:
            if not accepts(caller.engine.address):  # the client would retry for most of a second
                return False
            engine.get_capabilities()
    except KvasirError:
        return False
    return True


@command(app, "ls")
def ls(
    caller: Caller,
    prefix: Annotated[str, option("Only names with this beginning.")] = "",
    label: LabelOption = None,
    sort: Annotated[Order, option("Sort by last use, by name, or by bytes of the newest version.")] = Order.USED,
    limit: Annotated[int | None, option("Only the first N of the order.", min=1, metavar="N")] = None,
    has_all: Annotated[
        bool, option("Also conversations whose callers named no agent, as --prefix and --search list them.", "--all")
    ] = False,
    search: Annotated[
        str, option("Only agents whose name, title or labels have all these words.", metavar="WORDS")
    ] = "",
) -> None:
    """List agents that have names, the last used first. The title of a conversation is its label `title`, else its
    first words (of the first 100 that are listed, or of the first 1,000 that are searched).

    An agent's KV is hot (in the engine), warm (in the store), far (in the store's bucket) or asleep: see `kvasir agents
    sleep`.

    Kvasir's own labels are in --json and in `kvasir agents show`."""
    with store_client(caller) as client:
        found = list(client.every_agent(name_prefix=prefix, labels=labels_of(label or [])))
        has_all = bool(has_all or prefix or search)
        listed = [agent for agent in found if has_all or not agent.agent_id.startswith(UNNAMED_PREFIXES)]
        listed.sort(key=_ORDERS[sort])
        titles = titles_of(client, listed, most_read=_MOST_SEARCHED) if search else {}
        listed = [agent for agent in listed if has_words(agent, titles.get(agent.agent_id, ""), search)]
        shown = listed[:limit]
        titles = titles or titles_of(client, shown)
        is_far = "far" in client.get_capabilities().features

    engine = engine_side(caller, [agent.agent_id for agent in shown])
    kept = {agent.agent_id: temperature(agent, engine.hot, is_far=is_far) for agent in shown}

    def show(out: Console) -> None:
        out.print(_agents_table(shown, titles, kept) if shown else "no agent is listed")
        if unnamed := 0 if has_all else len(found) - len(listed):
            out.print(f"{unnamed} more that their callers did not name: --all lists them.", style="dim")
        if cut := len(listed) - len(shown):
            out.print(f"{cut} more by this order: --limit.", style="dim")
        if wakes := wakes_text(engine.wakes):
            out.print(wakes, style="dim")

    rows = [
        agent_row(agent) | {"title": titles.get(agent.agent_id, ""), **kept[agent.agent_id].columns} for agent in shown
    ]
    caller.result(rows, show)


@command(app, "show")
def show(caller: Caller, agent: AgentArgument) -> None:
    """Show one agent and its lines."""
    with store_client(caller) as client:
        found = client.get_agent(agent)
    caller.result(agent_row(found), lambda out: _show(out, found))


@command(app, "history")
def history(caller: Caller, agent: AgentArgument, line: LineOption = "") -> None:
    """List the versions that an agent can be rolled back to, newest first."""
    with store_client(caller) as client:
        versions = list(client.every_snapshot(agent, line))
    caller.result([snapshot_row(version) for version in versions], _versions_table(versions))


@command(app, "fork")
def fork(
    caller: Caller,
    source: AgentArgument,
    agent: Annotated[str, argument("The new agent's name.", "NEW")],
    version: VersionOption = None,
    line: LineOption = "",
) -> None:
    """Start a new agent with the memory of another agent. Copies no bytes."""
    with newest_client(caller) as client:
        made = client.fork_agent(source, agent, line, version)
    caller.result(agent_row(made), f"{agent} remembers the same as {source}.")


@command(app, "rollback")
def rollback(
    caller: Caller,
    agent: AgentArgument,
    version: Annotated[int, argument("The version to go back to.", "VERSION", min=1, callback=check_version)],
    line: LineOption = "",
) -> None:
    """Commit an old version again, as the newest. No version is removed."""
    with store_client(caller) as client:
        made = client.rollback_agent(agent, version, line)
    caller.result(snapshot_row(made), f"{agent} is at version {made.version}, which is version {version} again.")


@command(app, "rm")
def rm(
    caller: Caller,
    agent: AgentArgument,
    force: Annotated[bool, option("Delete it even if it is pinned.", "--force")] = False,
) -> None:
    """Delete an agent with all its lines and versions."""
    with store_client(caller) as client:
        answer = client.delete_agent(agent, force=force)
    gone_by = iso(answer.bytes_gone_by)
    value = {"agent_id": agent, "unshared_bytes": answer.unshared_bytes, "bytes_gone_by": gone_by}
    when = f"by {to_the_second(gone_by)} UTC" if gone_by else "by the next collection"
    freed = f"{size(answer.unshared_bytes)} that no other agent uses are freed {when}"
    text = f"{agent} is deleted. {freed if answer.unshared_bytes else 'Other agents use all that it held'}."
    caller.result(value, text)


@command(app, "label")
def label(
    caller: Caller,
    agent: AgentArgument,
    labels: Annotated[list[str], argument("KEY=VALUE sets, KEY= removes.", "KEY=VALUE")],
) -> None:
    """Set or remove labels."""
    _change(caller, agent, labels=labels_of(labels))


@command(app, "pin")
def pin(caller: Caller, agent: AgentArgument, off: Annotated[bool, option("Unpin it.", "--off")] = False) -> None:
    """Protect an agent from eviction and from rm. --off ends that."""
    _change(caller, agent, is_pinned=not off)


@command(app, "keep")
def keep(
    caller: Caller,
    agent: AgentArgument,
    versions: Annotated[int, argument("Versions of each line.", "VERSIONS", min=1, max=1000)],
) -> None:
    """Set how many versions of an agent the store keeps. The next turn removes older ones."""
    _change(caller, agent, retained_versions=versions)


def _change(caller: Caller, agent: str, **changes: Any) -> None:
    with store_client(caller) as client:
        changed = client.update_agent(agent, **changes)
    caller.result(agent_row(changed), lambda out: _show(out, changed))


@dataclass(frozen=True)
class WantedVersion:
    version: VersionOption = None
    line: LineOption = ""


@dataclass(frozen=True)
class WrittenForm:
    form: FormOption = carrying.Form.ARCHIVE
    model_name: Annotated[str, option("The model_id in a file of the format `seed`.")] = ""
    sealed: Annotated[bool, option("Encrypt the file, with a passphrase if there is no --key-file.", "--sealed")] = (
        False
    )
    key_file: KeyFileOption = None
    passphrase_file: PassphraseFileOption = None

    def lock(self) -> Lock | None:
        if not (self.sealed or self.key_file is not None or self.passphrase_file is not None):
            return None
        if self.form is not carrying.Form.ARCHIVE:
            raise failures.WrongUsage.of("--sealed", "the format `seed` has no sealed form")
        return carrying.lock_of(self.key_file, self.passphrase_file)


@command(app, "export")
def export(
    caller: Caller,
    agent: AgentArgument,
    file: Annotated[Path, argument("The file to write; - is standard output.", "FILE")],
    wanted: WantedVersion,
    written: WrittenForm,
    force: Annotated[bool, option("Replace a file of that name.", "--force")] = False,
) -> None:
    """Save one version of an agent's memory as a file. It is plain, even if the namespace is sealed, unless --sealed is
    given."""
    lock = written.lock()
    began = time.monotonic()
    if str(file) == "-":
        caller.out = caller.err  # words about the export are no part of it
    with store_client(caller) as client, newest_client(caller) as newest, carrying.target(file, replace=force) as out:
        pieces: Iterable[bytes] = newest.export_agent(agent, wanted.line, wanted.version)
        if written.form is carrying.Form.SEED:
            pieces = carrying.seed_pieces(pieces, written.model_name)
        if lock is not None:
            pieces = carrying.sealed_pieces(pieces, lock)
        elif "sealed" in client.get_capabilities().features:
            caller.note(f"The namespace is sealed, and {file} is plain; --sealed encrypts it.")
        size_bytes = sum(out.write(piece) for piece in pieces)
    about = {"format": written.form.value, "is_sealed": lock is not None}
    value = {"agent_id": agent, "file": str(file), "size_bytes": size_bytes, **about}
    seconds = time.monotonic() - began
    words = "not sealed" if lock is None else f"sealed with a {lock.kind} {lock.key_id}".rstrip()
    caller.result(value, f"{file}: {size(size_bytes)} in {seconds:.1f} s, {words}")


@dataclass(frozen=True)
class ReadForm:
    form: FormOption = carrying.Form.ARCHIVE
    of_agent: Annotated[
        str, option("For a file of the format `seed` that another program wrote: an agent here with the same model.")
    ] = ""
    key_file: KeyFileOption = None
    passphrase_file: PassphraseFileOption = None


@command(app, "import")
def import_(
    caller: Caller,
    file: Annotated[Path, argument("The file to read; - is standard input.", "FILE")],
    read_as: ReadForm,
    agent: Annotated[str, argument("The agent's name here. Default: the name in the file.", "AGENT")] = "",
    replace: Annotated[bool, option("Add a version to an agent that exists.", "--replace")] = False,
) -> None:
    """Read an agent's memory from a file, as a new version. A sealed file names the key that opens it."""
    if agent and not file.exists() and Path(agent).is_file():  # `kvasir agents export` has them in this order
        right = shlex.join(["kvasir", "agents", "import", agent, str(file)])
        raise failures.WrongUsage.of("FILE", f"there is no file {str(file)!r}. The file goes first: {right}")
    with store_client(caller) as client, carrying.source(file) as read:
        is_archive, keys = read_as.form is carrying.Form.ARCHIVE, (read_as.key_file, read_as.passphrase_file)
        header = carrying.header_of(read) if is_archive else None
        carrying.check_opens(header, file, *keys)
        if is_archive:
            pieces: Callable[[], Iterator[bytes]] = partial(pieces_of, read)
            if header is not None:
                lock = carrying.lock_for(header, file, caller.home, *keys)
                pieces = carrying.SealedFile(read, header, lock).pieces
            name = agent or carrying.agent_of_archive(file, pieces())
            made = client.import_agent(name, pieces(), replace=replace)
        else:
            made = carrying.import_seed_file(client, read, agent, replace=replace, of_agent=read_as.of_agent)
    caller.result(snapshot_row(made), arrived_words(made))


def unclaimed(client: StoreClient) -> list[str]:
    """Names of the agents that came back from a recovery without their owner."""
    facts = ((agent.agent_id, agent.ownership) for agent in client.every_agent())
    return [name for name, known in facts if known.state == pb.OWNER_STATE_MOVING and not known.peer]


def labels_of(texts: list[str]) -> dict[str, str]:
    labels: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise failures.WrongUsage.of("label", f"expected KEY=VALUE, got {text!r}")
        labels[key] = value
    return labels


def arrived_words(made: pb.SnapshotVersion) -> str:
    return f"{made.agent_id} is here at version {made.version}: {made.token_count} tokens, {size(made.total_bytes)}"


def _agents_table(agents: list[pb.Agent], titles: Mapping[str, str], kept: Mapping[str, Temperature]) -> Table:
    """Columns that are empty in every row are left out: names are long."""
    now = datetime.now(UTC)

    def row(agent: pb.Agent) -> tuple[object, ...]:
        newest: Any = agent.lines[0] if agent.lines else pb.SnapshotVersion()
        shown = agent.labels.keys() - {TITLE}
        labels = {key: agent.labels[key] for key in shown if key in _SETTINGS or not key.startswith(_OWN)}
        where = owner_words(agent.ownership)
        name = f"{agent.agent_id} ({where})" if where else agent.agent_id
        used = (ago(agent.used_at, now), until(agent.expires_at, now), "yes" if agent.is_pinned else "")
        sizes = (newest.version, newest.token_count, size(newest.total_bytes), kept[agent.agent_id].text)
        return name, titles.get(agent.agent_id, ""), *sizes, *used, labels_text(labels)

    columns = ("agent", "title", "version", "tokens", "bytes", "KV", "used", "expires", "pinned", "labels")
    rows = [row(agent) for agent in agents]
    full = [number for number, _ in enumerate(columns) if any(each[number] != "" for each in rows)]
    return table([columns[n] for n in full], ([each[n] for n in full] for each in rows), numbers=_NUMBERS)


def _versions_table(versions: list[pb.SnapshotVersion]) -> Table:
    now = datetime.now(UTC)

    def row(each: pb.SnapshotVersion) -> tuple[object, ...]:
        made_by = f"{origin(each.origin)} {each.origin_detail}".strip()
        made = (ago(each.created_at, now), made_by, short(each.kv_identity_hash))
        return each.version, each.parent_version, each.token_count, size(each.total_bytes), *made

    columns = ("version", "parent", "tokens", "bytes", "made", "by", "line")
    return table(columns, map(row, versions), numbers=_NUMBERS)


def _show(out: Console, agent: pb.Agent) -> None:
    labels = labels_text(agent.labels) or "none"
    pinned = "pinned" if agent.is_pinned else "not pinned"
    out.print(f"{agent.agent_id}: {pinned}, keeps {counted(agent.retained_versions, 'version')}, labels: {labels}")
    if agent.HasField("expires_at"):
        out.print(f"deleted {until(agent.expires_at, datetime.now(UTC))} at the earliest if nobody uses it")
    if where := owner_words(agent.ownership):
        out.print(where)
    out.print(_versions_table(list(agent.lines)))
