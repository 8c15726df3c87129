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
    "title": "the request wants a title, topic, tags or next questions of a conversation",
    "summary": "the request wants a summary, which replaces the conversation later",
    "probe": "one short message whose reply may have one token: nobody continues it",
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
        "The engine's address. Repeat it for several engines of one store, which share agents by name; each must "
        "accept the callers' keys.",
        metavar="unix:/path|HOST:PORT",
        of_home=True,
        needed=True,
    )
    engine_wait_s: float = option(
        0.0,
        "How long the gateway's start waits for an engine that starts at the same time. After that it continues "
        "without.",
        least=0,
        of_home=True,
    )
    state_dir: Path = option(
        Path(), "The directory of the key for names of conversations, and for thoughts.", of_home=True, needed=True
    )
    token_file: Path | None = option(
        None, "A file with the gateway's own token, for an engine that requires one.", of_home=True
    )
    ca_file: Path | None = option(None, "PEM: the engines' certificates, or their authority's.", of_home=True)
    peer: dict[str, str] = option(
        {},
        "An engine to which turns may move, by the name that --engine has for it. It must accept the callers' keys, "
        "which the gateway shows to it: trust it as much as --engine. Name --engine itself, too, as its peers name "
        "it; then the gateway follows a turn that comes back. An agent that moved to another store (the engine's "
        "--peer-store) stays there: the engine refuses its next request here (AGENT_MOVED).",
        metavar="NAME=ADDRESS",
        up="peer",
    )
    peer_ca_file: dict[str, Path] = option({}, "PEM, as --ca-file.", metavar="NAME=PATH", up="peer-ca-file")
    credentials: Path | None = option(
        None, "The file whose tokens are API keys; the engine's credentials file.", metavar="FILE", of_home=True
    )
    no_keys: bool = option(False, "Callers need no key, and act with the gateway's own rights.", of_home=True)
    home: Path | None = option(None, "The home whose tokens, peers and backups the page manages.", of_home=True)
    service_admin: tuple[str, ...] = option(
        (),
        "A credential with the role admin that may manage the home on the page; repeatable. Give it to no program: "
        "it can make tokens.",
        metavar="NAME",
        of_home=True,
    )
    host: tuple[str, ...] = option((), "A name of this server, in addition to loopback addresses.", metavar="NAME")
    origin: tuple[str, ...] = option(
        (), "A web site whose pages may call the gateway, as https://a.example.", metavar="URL"
    )


@dataclass(frozen=True, kw_only=True)
class GatewayReading(Table):
    """How requests are read."""

    max_body_mib: int = option(8, "The largest body of a request, in MiB.", above=0)
    strict: bool = option(
        False,
        "Refuse, by name, settings that the gateway otherwise ignores, and a max_tokens that does not fit.",
        up="strict",
    )
    any_model: bool | None = option(
        None,
        "The loaded model answers requests for unknown models; the answer names it. Default: yes, unless --strict or "
        "a host (KVASIR_GATEWAY_HOST) is given.",
        up="any-model",
    )
    alias: dict[str, str] = option(
        {},
        "A name that clients may use for one of the engine's models; the answer names the model. Repeatable.",
        metavar="NAME=MODEL",
        up="alias",
    )
    volatile: str = option(
        ",".join(sorted(DEFAULT)),
        "Rules that keep volatile text of a prompt as the memory has it; an agent's label kvasir.volatile and a "
        f"request's header override them. {_each(RULES)}.",
        metavar="RULE,…|none",
        check=_volatile,
        up="volatile",
    )
    side_calls: str = option(
        ",".join(SIDE_CALLS),
        f"Kinds of requests beside a conversation that leave no memory if they name no agent. {_each(SIDE_CALLS)}.",
        metavar="RULE,…|none",
        check=side_calls_of,
    )


@dataclass(frozen=True, kw_only=True)
class GatewayTable(GatewayFiles, GatewayReading, ServiceTable):
    program: ClassVar[str] = "gateway"

    def check(self) -> None:
        if self.credentials is None and not self.no_keys:
            text = "FILE has the API keys; --no-keys lets every program of this machine act as you"
            raise WrongOption("credentials", text)
        if self.credentials is not None and self.no_keys:
            raise WrongOption("no_keys", "give --credentials or this, one of them")
        if len({*self.engine}) != len(self.engine):
            raise WrongOption("engine", "an address is given twice")
        if unknown := self.peer_ca_file.keys() - self.peer.keys():
            raise WrongOption("peer_ca_file", f"{min(unknown)!r} is no --peer")
