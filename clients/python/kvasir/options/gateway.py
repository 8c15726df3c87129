"""The options of the HTTP gateway: `python -m kvasir_gateway`."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from kvasir.errors import InvalidArgument
from kvasir.options.common import ServiceTable
from kvasir.options.table import Table, WrongOption, option
from kvasir.volatile import DEFAULT, NONE, RULES, rules_of

DEFAULT_LISTEN = "127.0.0.1:8642"
SIDE_CALLS: Mapping[str, str] = {
    "title": "a title, topic, tags or next questions of a conversation are asked for",
    "summary": "a summary of the conversation is asked for, which takes its place later",
    "probe": "one short message whose reply may have one token: nobody goes on from it",
}
"""Which requests are side calls, by the rule's name."""


def side_calls_of(text: str) -> list[str]:
    """RULE,… or none. Raises ValueError."""
    names = [name.strip() for name in text.split(",")] if text != NONE else []
    if unknown := [name for name in names if name not in SIDE_CALLS]:
        raise ValueError(f"{unknown[0][:40]!r} is none of {', '.join(SIDE_CALLS)}, {NONE}")
    return names


def _volatile(text: str) -> None:
    try:
        rules_of(text, "")
    except InvalidArgument as error:
        raise ValueError(error.message.removeprefix(": ")) from None


def _each(rules: Mapping[str, str]) -> str:
    return ". ".join(f"{name}: {applies_to}" for name, applies_to in rules.items())


@dataclass(frozen=True, kw_only=True)
class GatewayFiles(Table):
    """Addresses and keys."""

    listen: str = option(DEFAULT_LISTEN, "A loopback address.", metavar="HOST:PORT", of_home=True)
    engine: tuple[str, ...] = option(
        (),
        "The engine. Several times: engines of one store, which share agents by name; callers' keys must hold at each.",
        metavar="unix:/path|HOST:PORT",
        of_home=True,
        needed=True,
    )
    engine_wait_s: float = option(
        0.0,
        "How long the start waits for an engine that is being started beside it. Then it goes on without.",
        least=0,
        of_home=True,
    )
    state_dir: Path = option(
        Path(), "Where the key of conversations' names and thoughts is kept.", of_home=True, needed=True
    )
    token_file: Path | None = option(None, "The gateway's own token, for an engine that wants one.", of_home=True)
    ca_file: Path | None = option(None, "PEM: the engines' certificates, or their authority's.", of_home=True)
    peer: dict[str, str] = option(
        {},
        "An engine to which turns may move, by the engine's name for it; callers' keys must hold there. They are shown "
        "to it as they are: it must be as trusted as --engine. Name --engine itself too, as its peers name it, and a "
        "turn that comes back is followed. An agent that moved to another store (the engine's --peer-store) stays "
        "there: its next request here is refused (AGENT_MOVED).",
        metavar="NAME=ADDRESS",
        up="peer",
    )
    peer_ca_file: dict[str, Path] = option({}, "PEM, as --ca-file.", metavar="NAME=PATH", up="peer-ca-file")
    credentials: Path | None = option(None, "Whose tokens are API keys: as the engine's.", metavar="FILE", of_home=True)
    no_keys: bool = option(False, "Callers need no key and act as the gateway does.", of_home=True)
    home: Path | None = option(None, "The home whose tokens, peers and backups the page manages.", of_home=True)
    service_admin: tuple[str, ...] = option(
        (),
        "A credential with the role admin that may do so, once for each. No program's: it makes tokens there.",
        metavar="NAME",
        of_home=True,
    )
    host: tuple[str, ...] = option((), "A name of this server, beside loopback addresses.", metavar="NAME")
    origin: tuple[str, ...] = option((), "A site whose pages may call, as https://a.example.", metavar="URL")


@dataclass(frozen=True, kw_only=True)
class GatewayReading(Table):
    """How requests are read."""

    max_body_mib: int = option(8, "A request with a larger body is refused.", above=0)
    strict: bool = option(
        False, "Refuse by name what is else ignored, and a max_tokens that does not fit.", up="strict"
    )
    any_model: bool | None = option(
        None,
        "The loaded model answers for names that are no model's, and the answer names it. Left out: yes, unless "
        "--strict is given, or --host.",
        up="any-model",
    )
    alias: dict[str, str] = option(
        {},
        "A name that clients may use for one of the engine's models; the answer names the model. Several times.",
        metavar="NAME=MODEL",
        up="alias",
    )
    volatile: str = option(
        ",".join(sorted(DEFAULT)),
        "What of a prompt does not change from request to request; an agent's label kvasir.volatile and a request's "
        f"header go before it. {_each(RULES)}.",
        metavar="RULE,…|none",
        check=_volatile,
        up="volatile",
    )
    side_calls: str = option(
        ",".join(SIDE_CALLS),
        f"Which requests beside a conversation leave no memory, when they name no agent. {_each(SIDE_CALLS)}.",
        metavar="RULE,…|none",
        check=side_calls_of,
    )


@dataclass(frozen=True, kw_only=True)
class GatewayTable(GatewayFiles, GatewayReading, ServiceTable):
    program: ClassVar[str] = "gateway"

    def check(self) -> None:
        if self.credentials is None and not self.no_keys:
            text = "FILE names the API keys; --no-keys lets every program of this machine act as you"
            raise WrongOption("credentials", text)
        if self.credentials is not None and self.no_keys:
            raise WrongOption("no_keys", "give --credentials or this, one of them")
        if len({*self.engine}) != len(self.engine):
            raise WrongOption("engine", "an address is given twice")
        if unknown := self.peer_ca_file.keys() - self.peer.keys():
            raise WrongOption("peer_ca_file", f"{min(unknown)!r} is no --peer")
