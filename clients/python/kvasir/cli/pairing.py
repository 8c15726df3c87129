"""`kvasir pair` and `kvasir peers …`, by the store's own program beside the running store."""

import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.console import Console

from kvasir import errors
from kvasir.address import accepts
from kvasir.cli.caller import Caller, command
from kvasir.cli.rows import counted, to_the_second
from kvasir.cli.running.checks import check_installed
from kvasir.cli.running.program import MODULE, option_words
from kvasir.cli.showing.arguments import argument, option
from kvasir.cli.showing.tables import table
from kvasir.cli.showing.terminal import visible

app = typer.Typer(help="Manage the Macs that are paired with this one.", no_args_is_help=True)
PeerArgument = Annotated[str, argument("The peer's name here.", "PEER")]
GivesOption = Annotated[
    list[str] | None,
    option(
        "The other Mac's right over agents of this one: read, move (read, and take agents away) or claim (also claim "
        "agents that ever moved, for Macs of one owner). With NAMESPACE= for another namespace than default; "
        "repeatable.",
        metavar="[NAMESPACE=]RIGHT",
    ),
]
TakesOption = Annotated[
    list[str] | None,
    option(
        "What the other Mac may send here unasked: nothing, copy, or move (copies, agents, and decoding turns). What "
        "you fetch yourself needs no right. Repeatable.",
        metavar="[NAMESPACE=]RIGHT",
    ),
]


_WAYS = ("gives", "takes")


@dataclass(frozen=True)
class PairOptions:
    """How this Mac is named and reached, and for how long it waits."""

    at: Annotated[
        str, option("HOST:PORT that the other Mac shows. Not needed with its whole line, or on one machine.")
    ] = ""
    listen: Annotated[
        str,
        option(
            "This Mac's own name or address in the network, as studio.local, at which paired Macs can reach its store "
            "and its engine. Default: 127.0.0.1, which no other machine can reach.",
            metavar="HOST[:PORT]",
        ),
    ] = ""
    name: Annotated[str, option("This Mac's name for itself. Default: its host name.")] = ""
    as_: Annotated[str, option("The other Mac's name here. Default: its name for itself.", "--as")] = ""
    announce: Annotated[
        bool,
        option(
            "While it waits, let `kvasir peers find` list this Mac in the network (mDNS). Needs kvasir[lan].",
            "--announce",
        ),
    ] = False
    minutes: Annotated[float, option("How long the code is valid.", min=0.01, max=60)] = 10

    def words(self) -> list[str]:
        words = [*option_words("--at", self.at), *option_words("--listen", self.listen)]
        words += [*option_words("--as", self.as_), "--name", self.name or _host_name()]
        words += ["--lifetime-s", str(self.minutes * 60), "--until-eof"]
        return words + (["--announce"] if self.announce else [])


def pair(
    caller: Caller,
    options: PairOptions,
    code: Annotated[
        str, argument("The code or the line that the other Mac shows. Default: show one here, and wait.", "CODE")
    ] = "",
    gives: GivesOption = None,
    takes: TakesOption = None,
) -> None:
    """Pair this Mac with another Mac: one shows a code, which you type at the other.

    Each keeps the other's certificate. From then on their stores and engines use TLS with these two certificates only,
    and each may read the other's agents in the namespaces that were given. Options give more rights: with --gives move
    the other Mac may take agents away, with --takes move it may bring agents, with their decoding turns. `kvasir peers
    allow` changes rights later. A second pairing keeps the rights that no option names.

    --json: an object on each line: waiting (code, line, address), refused (from, reason), paired (name, pin, address).
    """
    caller.home.make()
    words = [*options.words(), *_rights(gives, takes)]
    with _program(caller, "pair", *words, names=[code] if code else []) as lines:
        for line in lines:
            if caller.as_json:
                caller.line(line)
            else:
                _show_step(caller, line)


def _show_step(caller: Caller, line: dict[str, Any]) -> None:
    match line["event"]:
        case "waiting":
            caller.out.print(f"Code: {line['code']}")
            caller.out.print(f"Line: {line['line']}")
            host = line["address"].rpartition(":")[0]
            where = "on this machine only" if host == "127.0.0.1" else f"at {line['address']}"
            caller.say(
                f"On the other Mac, run `kvasir pair {line['code']} --at {line['address']}`, or paste the "
                f"line after `kvasir pair`. Waiting {where} for {line['seconds'] / 60:g} min; "
                "the code is good for one use."
            )
        case "refused":
            caller.note(f"refused {visible(line['from'])}: {visible(line['message'])}")
        case "paired":
            _show_paired(caller, line)


def _show_paired(caller: Caller, line: dict[str, Any]) -> None:
    peer, store = line["name"], line["store"]
    caller.out.print(f"Paired with {peer} (key {line['pin'][:16]}…)")
    caller.out.print(_rights_text(line))
    if line["address"]:
        caller.say(
            f"`kvasir agents move AGENT --to {peer}` moves an agent there if {peer} takes moves, and --from brings one "
            "here if it gives them."
        )
    else:
        caller.say(f"{peer} lets nobody pull from it: pair again, with --listen there.")
    if not store["is_running"]:
        caller.say("The store does not run; it will know when it starts.")
    elif not store["address"]:
        caller.say(f"The store cannot listen on {line['our_address']}: `kvasir logs` shows why.")


@command(app, "ls")
def ls(
    caller: Caller,
    try_them: Annotated[bool, option("Also connect to each peer, and show which are unreachable.", "--try")] = False,
) -> None:
    """List the peers of this home's store."""
    answer = _only(caller, "peers", "ls")
    if try_them:
        with caller.busy("connecting"), ThreadPoolExecutor() as beside:
            for peer, is_reached in zip(answer["peers"], beside.map(_is_reached, answer["peers"]), strict=True):
                peer["is_reached"] = is_reached
    caller.result(answer, lambda out: _show_peers(out, answer["peers"]))


@command(app, "find")
def find(caller: Caller, seconds: Annotated[float, option("How long to listen.", min=0.1, max=60)] = 3) -> None:
    """List Macs that wait with `kvasir pair --announce` (mDNS). Anybody may announce a name; the code proves it."""
    with caller.busy("listening"):
        answer = _only(caller, "peers", "find", "--seconds", str(seconds))
    caller.result(answer, lambda out: _show_found(out, answer["found"]))


@command(app, "rm")
def rm(caller: Caller, peer: PeerArgument) -> None:
    """Remove a peer. Calls in both directions end at once, and its key no longer opens anything here."""
    answer = _only(caller, "peers", "rm", names=[peer])
    ended = answer["store"].get("ended_calls", 0)
    text = f"{peer} is removed" + (f"; ended {counted(ended, 'running call')}" if ended else "")
    caller.result(answer, text)


@command(app, "allow")
def allow(caller: Caller, peer: PeerArgument, gives: GivesOption = None, takes: TakesOption = None) -> None:
    """Change the rights of a peer here. Rights that no option names stay. Running calls that become forbidden end."""
    answer = _only(caller, "peers", "allow", *_rights(gives, takes), names=[peer])
    caller.result(answer, _rights_text(answer))


@command(app, "rename")
def rename(
    caller: Caller,
    peer: PeerArgument,
    new_name: Annotated[str, argument("Its new name here.", "NEW-NAME")],
) -> None:
    """Rename a peer here. It stays paired; its running calls end and start again."""
    answer = _only(caller, "peers", "rename", names=[peer, new_name])
    caller.result(answer | {"name": new_name}, f"{peer} is called {new_name} now")


def _show_peers(out: Console, peers: list[dict[str, Any]]) -> None:
    at = "paired (UTC)"
    columns = ("name", "store", "engine", "may here", "brings", "key", at)
    out.print(table(columns, map(_cells, peers), whole=at) if peers else "no peers; `kvasir pair` makes one")


def _cells(peer: dict[str, Any]) -> tuple[str, ...]:
    # As the options take them: a right without a namespace is for the default one.
    gives, takes = (", ".join(each.removeprefix("default=") for each in peer[way].split(", ")) for way in _WAYS)
    rights = (gives or "read (of its token's)", takes or "nothing")
    key = f"{peer['pin'][:8]}…" if peer["is_paired"] else "by hand"
    store, engine = peer["address"], peer["engine_address"]
    host = store.rpartition(":")[0]
    shown = engine.removeprefix(host) if host else engine  # a terminal has 80 columns
    reached = "" if peer.get("is_reached", True) in (True, None) else " (not reached)"
    addresses = (store + reached or "listens to nobody", shown or "takes no turns")
    return peer["name"], *addresses, *rights, key, to_the_second(peer["paired_at"])


def _rights_text(peer: dict[str, Any]) -> str:
    return f"{peer['name']} may here: {peer['gives']}; it may bring: {peer['takes']}"


def _rights(gives: list[str] | None, takes: list[str] | None) -> list[str]:
    given = (("--gives", gives), ("--takes", takes))
    return [word for option, texts in given for text in texts or () for word in (option, text)]


def _is_reached(peer: dict[str, Any]) -> bool | None:
    """Whether something listens at its store's address; None if it listens to nobody."""
    return accepts(peer["address"]) if peer["address"] else None


def _show_found(out: Console, found: list[dict[str, str]]) -> None:
    for each in found:
        out.print(f"{visible(each['name'])}: `kvasir pair CODE --at {each['address']}`")
    if not found:
        out.print("no Mac announces that it waits; on the other Mac: `kvasir pair --listen ITS-NAME --announce`")


def _host_name() -> str:
    """The first part of the host's name, of the letters that a peer's name may have."""
    first = socket.gethostname().partition(".")[0]
    return re.sub(r"[^A-Za-z0-9_-]", "-", first).strip("-_")[:64] or "mac"


def _only(caller: Caller, *words: str, names: Sequence[str] = ()) -> dict[str, Any]:
    """The one answer of the program."""
    with _program(caller, *words, names=names) as lines:
        return next(lines)


@contextmanager
def _program(caller: Caller, *words: str, names: Sequence[str] = ()) -> Iterator[Iterator[dict[str, Any]]]:
    """The lines of the store's program, as they come. `names`: arguments that are no options, whatever they look like.
    Raises its refusal."""
    check_installed("store")
    store = caller.store
    argv = [sys.executable, MODULE, "cachestore_svc", *words, "--peers-file", str(caller.home.peers_file)]
    argv += ["--audit-file", str(caller.home.audit_file("store"))]
    argv += ["--store", store.address, *option_words("--store-token-file", store.token_file)]
    argv += [*option_words("--store-ca-file", store.ca_file), *(["--", *names] if names else [])]
    # The program ends with its standard input, and so with this one, however this one ends.
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as program:
        try:
            yield _lines(program)
        except BaseException:
            program.terminate()
            raise


def _lines(program: "subprocess.Popen[str]") -> Iterator[dict[str, Any]]:
    assert program.stdout is not None
    assert program.stderr is not None
    for text in program.stdout:
        line: dict[str, Any] = json.loads(text)
        if (told := line.get("error")) is not None:
            kind = getattr(errors, told.pop("kind"), errors.FailedPrecondition)
            raise kind(told.pop("message"), **told)
        yield line
    if program.wait() != 0:
        last = program.stderr.read().strip().splitlines()[-1:] or [f"exit code {program.returncode}"]
        raise errors.FailedPrecondition(f"the store's program failed: {last[0]}", reason="COMMAND_FAILED")
