"""`kvasir tokens …`: who may call this home's services, each with a namespace, roles, and a token in a file."""

import re
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Annotated, Any

import typer

from kvasir.cli.caller import Caller, command
from kvasir.cli.running.holding import is_led, tokens_locked
from kvasir.cli.running.home import Home
from kvasir.cli.running.own_credentials import is_own, known_credentials, make_credentials
from kvasir.cli.showing.arguments import argument, option
from kvasir.credentials import (
    ADMIN,
    CLIENT,
    DEFAULT_NAMESPACE,
    ENGINE,
    HANDOVER,
    OWNER,
    PEER,
    Credentials,
    Principal,
    engine_of,
    replace_private_text,
)
from kvasir.errors import AlreadyExists, FailedPrecondition, InvalidArgument, NotFound

app = typer.Typer(help="Manage the credentials of this home, each of one namespace.", no_args_is_help=True)

_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")  # it becomes the name of a file, and part of an option


class Role(StrEnum):
    """What a caller may do; the engine's own credentials are made with the namespace."""

    CLIENT = CLIENT
    ADMIN = ADMIN
    PEER = PEER
    HANDOVER = HANDOVER


@command(app, "new")
def new(
    caller: Caller,
    name: Annotated[str, argument("Its name in the audit.", "NAME")],
    namespace: Annotated[
        str, option("Its agents' namespace. Callers of one see nothing of another.")
    ] = DEFAULT_NAMESPACE,
    role: Annotated[
        list[Role] | None,
        option(
            "client (turns and agents; the default), admin, peer, or handover (for the engine of the paired Mac "
            "NAME, which gives turns). Repeatable."
        ),
    ] = None,
) -> None:
    """Make a token. The command writes it to a file that only you can read, and shows it nowhere else.

    Programs send it as `Authorization: Bearer …` or as an API key; `kvasir --token-file FILE …` does, too. Running
    services accept it after `kvasir reload`. For a new namespace the command also makes a credential of the engine,
    which stores the memories there. It rewrites credentials.toml without its comments."""
    check_word("NAME", name)
    check_word("--namespace", namespace)
    _check_not_reserved(name)
    home = caller.home
    with _changing(home) as known:
        _check_new(name, namespace, known.principals)
        engine = Principal(engine_of(namespace), namespace, frozenset({ENGINE}))
        is_new = engine.name not in {each.name for each in known.principals}
        wanted = [Principal(name, namespace, frozenset(str(each) for each in role or [Role.CLIENT]))]
        tokens = {each: secrets.token_urlsafe(32) for each in (*wanted, *([engine] if is_new else []))}
        credentials = known.with_tokens(tokens)
        for principal, token in tokens.items():  # before they are listed: a reader of the list finds all files
            replace_private_text(home.tokens / f"{principal.name}.token", token + "\n")
        replace_private_text(home.credentials_file, credentials.text)
    then = _then(home)
    made = {**_row(home, wanted[0]), "then": then}
    caller.result(made, made["token_file"])
    caller.say(f"{name} may call in namespace {namespace}, after: {then}")


@command(app, "ls")
def ls(caller: Caller) -> None:
    """List the credentials, with their namespaces and roles. Prints no token."""
    rows = [_row(caller.home, each) for each in _known(caller.home).principals]

    def show(out: Any) -> None:
        for row in rows:
            out.print(f"{row['name']}: namespace {row['namespace']}, {', '.join(row['roles'])}; {row['token_file']}")

    caller.result({"tokens": rows}, show)


@command(app, "rm")
def rm(caller: Caller, name: Annotated[str, typer.Argument(metavar="NAME")]) -> None:
    """Remove a token. `kvasir reload` ends its calls. The namespace's agents stay, for its other and later tokens.

    The command rewrites credentials.toml without its comments."""
    if is_own(name):
        raise InvalidArgument.of("NAME", f"{name} is the home's own, without which it does not work")
    _known(caller.home)  # a home that has none is not made for this
    with _changing(caller.home) as known:
        found = next((each for each in known.principals if each.name == name), None)
        if found is None:
            raise NotFound(f"no token {name!r}: `kvasir tokens ls` lists them", reason="NO_SUCH_TOKEN")
        replace_private_text(caller.home.credentials_file, known.without({name}).text)
        (caller.home.tokens / f"{name}.token").unlink(missing_ok=True)
    caller.result(_row(caller.home, found), f"removed {name}")
    caller.say(f"Its calls end with: {caller.home.command('reload')}")


@contextmanager
def _changing(home: Home) -> Iterator[Credentials]:
    """What there is, while no other command changes it. A home that has none yet gets its first ones."""
    home.make()
    make_credentials(home)
    with tokens_locked(home):
        yield _known(home)


def _known(home: Home) -> Credentials:
    if not home.credentials_file.exists():
        text = f"{home.root} has no credentials yet: `{home.command('up')}` makes them"
        raise FailedPrecondition(text, reason="NO_CREDENTIALS")
    return known_credentials(home)


def _row(home: Home, principal: Principal) -> dict[str, Any]:
    file = home.tokens / f"{principal.name}.token"
    roles, own = sorted(principal.roles), is_own(principal.name)
    row = {"name": principal.name, "namespace": principal.namespace, "roles": roles, "token_file": str(file)}
    return {**row, "is_of_home": own}


def _then(home: Home) -> str:
    """The command after which a new token is good for all that it may do."""
    if not is_led(home):
        return home.command("up")
    if (running := home.running()) is not None and not running.token_file:
        return f"{home.command('down')}, then {home.command('up')}"  # its services know no tokens: all callers are you
    return home.command("reload")


def _check_not_reserved(name: str) -> None:
    if name.casefold().startswith("engine"):
        raise InvalidArgument.of("NAME", "names that begin with engine are the engine's own")
    if name.casefold() == OWNER.name:
        raise InvalidArgument.of(
            "NAME", f"{OWNER.name} is what the audit calls callers at the Unix socket: take another"
        )


def _check_new(name: str, namespace: str, known: Iterable[Principal]) -> None:
    """Raises for words that differ from a known one in case alone: they are files, which some systems take for one."""
    namespaces = {DEFAULT_NAMESPACE}
    for each in known:
        if each.name.casefold() == name.casefold():
            raise AlreadyExists(f"there is a token {each.name!r} already: remove it first, or take another name")
        namespaces.add(each.namespace)
    if namespace not in namespaces and (alike := [it for it in namespaces if it.casefold() == namespace.casefold()]):
        text = f"there is {alike[0]!r} already, from which only case tells {namespace!r}: take another"
        raise InvalidArgument.of("--namespace", text)


def check_word(field: str, text: str) -> None:
    """Raises InvalidArgument, naming `field`, for a name or a namespace that no token could have."""
    if _WORD.fullmatch(text) is None:
        expected = "1 to 64 letters, digits, dots, - and _, the first a letter or digit"
        raise InvalidArgument.of(field, f"expected {expected}, got {text[:70]!r}")
