"""The pages of whoever operates a home, and their forms. Others get a refusal that names the needed key."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from pathlib import Path

from kvasir.credentials import ADMIN, read_token
from kvasir.errors import FailedPrecondition, InvalidArgument, KvasirError, PermissionDenied
from kvasir.waits import WORK_S

from kvasir_gateway.door.security import KeyHolder
from kvasir_gateway.page import looking
from kvasir_gateway.page.look import Answer, Handler, Look
from kvasir_gateway.page.operating.commands import HomeCommands
from kvasir_gateway.page.operating.jobs import Jobs

KINDS: Mapping[str, str] = {"pair": "peers", "fetch": "models", "backup": "home"}
"""What may take long, and the page that shows it."""
ROLES = ("client", "client,admin", "admin", "peer", "handover")
GIVES, TAKES = ("read", "move", "claim"), ("nothing", "copy", "move")
_MOST_LINES = 200  # of the audit
_OwnHandler = Callable[[Look, HomeCommands, Jobs], Awaitable[Answer]]


class Operating:
    """The handlers of the operator's half."""

    def __init__(self, home: Path | None, operators: Collection[str], now: Callable[[], float]) -> None:
        """`home`: what `kvasir up` runs this gateway for; None: nothing is operated here. `operators`: names of
        credentials with the role admin. `now`: Unix seconds."""
        self._operators = frozenset(operators)
        self._home = HomeCommands(home) if home is not None else None
        self._jobs = Jobs(self._home, now) if self._home is not None else None

    def is_operator(self, holder: KeyHolder) -> bool:
        """Whether a caller may operate the home. Without keys nobody is: every program of this machine calls then."""
        caller = holder.principal
        return holder.token is not None and caller.name in self._operators and ADMIN in caller.roles

    def command(self, holder: KeyHolder) -> Callable[[str], str]:
        """How a caller types a command. Its operator alone is shown where the home lies."""
        return self._home.typed if self._home is not None and self.is_operator(holder) else "kvasir {}".format

    def pages(self) -> Mapping[str, Handler]:
        return self._for_operators(
            home=self._show_home,
            tokens=self._show_tokens,
            peers=self._show_peers,
            keys=self._show_keys,
            models=self._show_models,
            audit=self._show_audit,
            job=self._show_job,
        )

    def writes(self) -> Mapping[str, Handler]:
        return self._for_operators(
            **{"token-new": self._new_token, "token-rm": self._remove_token, "job-stop": self._stop},
            backup=self._backup,
            pair=self._pair,
            unpair=self._unpair,
            fetch=self._fetch,
        )

    async def close(self) -> None:
        if self._jobs is not None:
            await self._jobs.close()

    def _for_operators(self, **handlers: _OwnHandler) -> Mapping[str, Handler]:
        return {name: self._guarded(handler) for name, handler in handlers.items()}

    def _guarded(self, handler: _OwnHandler) -> Handler:
        async def guarded(look: Look) -> Answer:
            if not self.is_operator(look.visitor.holder):
                text = "only who operates this home may see or change this, by no app's key: sign in with `kvasir open`"
                raise PermissionDenied(text, metadata={"roles": ADMIN})
            if self._home is None or self._jobs is None:
                raise FailedPrecondition("this gateway serves no home: one that `kvasir up` starts does")
            return await handler(look, self._home, self._jobs)

        return guarded

    async def _show_home(self, look: Look, home: HomeCommands, jobs: Jobs) -> Answer:
        status = await looking.panel(home.value("status"), looking.COMMAND_S)
        return look.shown("operating/home.html", found=status, kind="backup", job=jobs.of("backup"))

    async def _show_tokens(self, look: Look, home: HomeCommands, _jobs: Jobs) -> Answer:
        listed = await looking.panel(home.value("tokens", "ls"), looking.COMMAND_S)
        return look.shown("operating/tokens.html", listed=listed, roles=ROLES)

    async def _show_peers(self, look: Look, home: HomeCommands, jobs: Jobs) -> Answer:
        listed = await looking.panel(home.value("peers", "ls", "--try"), looking.COMMAND_S)
        return look.shown(
            "operating/peers.html", listed=listed, gives=GIVES, takes=TAKES, kind="pair", job=jobs.of("pair")
        )

    async def _show_keys(self, look: Look, home: HomeCommands, _jobs: Jobs) -> Answer:
        return look.shown(
            "operating/keys.html", listed=await looking.panel(home.value("keys", "ls"), looking.COMMAND_S)
        )

    async def _show_models(self, look: Look, home: HomeCommands, jobs: Jobs) -> Answer:
        models, fetched = await asyncio.gather(
            looking.panel(look.client.list_models()),
            looking.panel(home.value("models", "ls", "--fetched"), looking.COMMAND_S),
        )
        return look.shown("operating/models.html", models=models, fetched=fetched, kind="fetch", job=jobs.of("fetch"))

    async def _show_audit(self, look: Look, home: HomeCommands, _jobs: Jobs) -> Answer:
        """What needs attention, or all: the newest first."""
        asked = {name: look.query(name).strip() for name in ("agent", "since")}
        words = [f"--{name}={value}" for name, value in asked.items() if value]
        chosen = [name for name in ("refused", "all") if look.query(name)]
        words += [f"--limit={_MOST_LINES + 1}", *(f"--{name}" for name in chosen)]
        done = await home.done("audit", *words)
        done.check()
        lines = done.lines[::-1]
        shown, has_more = lines[:_MOST_LINES], len(lines) > _MOST_LINES
        return look.shown("operating/audit.html", lines=shown, has_more=has_more, asked=asked, chosen=chosen)

    async def _show_job(self, look: Look, _home: HomeCommands, jobs: Jobs) -> Answer:
        """A job alone, for the script that renews it."""
        kind = _kind(look.query("kind"))
        return look.shown("operating/job.html", kind=kind, job=jobs.of(kind))

    async def _new_token(self, look: Look, home: HomeCommands, _jobs: Jobs) -> Answer:
        """The token is in this answer and in its file, and nowhere else."""
        namespace, roles = look.form.get("namespace", "").strip(), look.form.get("role", "")
        if roles not in ROLES:
            raise InvalidArgument.of("role", f"expected one of {', '.join(ROLES)}")
        words = [f"--namespace={namespace}", *(f"--role={role}" for role in roles.split(","))]
        made = await home.value("tokens", "new", *words, "--", look.form.get("name", "").strip())
        token = await asyncio.to_thread(read_token, Path(made["token_file"]))
        return look.shown("operating/token.html", made=made, token=token, remark=await _reloaded(home))

    async def _remove_token(self, look: Look, home: HomeCommands, _jobs: Jobs) -> Answer:
        await home.value("tokens", "rm", "--", look.form.get("name", ""))
        if remark := await _reloaded(home):
            raise FailedPrecondition(f"the token is removed, but goes on where the new set was not read: {remark}")
        return look.goto("tokens", done="revoke")

    async def _backup(self, look: Look, _home: HomeCommands, jobs: Jobs) -> Answer:
        await jobs.start("backup", "this home", ["backup", "--progress"])
        return look.goto("home")

    async def _pair(self, look: Look, _home: HomeCommands, jobs: Jobs) -> Answer:
        gives, takes = look.form.get("gives", ""), look.form.get("takes", "")
        for field, given, known in (("gives", gives, GIVES), ("takes", takes, TAKES)):
            if given not in known:
                raise InvalidArgument.of(field, f"expected one of {', '.join(known)}")
        await jobs.start("pair", "another Mac", ["pair", f"--gives={gives}", f"--takes={takes}"])
        return look.goto("peers")

    async def _unpair(self, look: Look, home: HomeCommands, _jobs: Jobs) -> Answer:
        await home.value("peers", "rm", "--", look.form.get("peer", ""))
        return look.goto("peers", done="unpair")

    async def _fetch(self, look: Look, _home: HomeCommands, jobs: Jobs) -> Answer:
        name = look.form.get("model", "").strip()
        # A large model takes hours, and its loader may be silent while it writes a file of gigabytes.
        await jobs.start("fetch", name, ["models", "pull", "--progress", "--", name], 5 * WORK_S)
        return look.goto("models")

    async def _stop(self, look: Look, _home: HomeCommands, jobs: Jobs) -> Answer:
        kind = _kind(look.form.get("kind", ""))
        await jobs.stop(kind)
        return look.goto(KINDS[kind])


async def _reloaded(home: HomeCommands) -> str:
    """Let the services take what changed; returns why one did not, or an empty text."""
    try:
        await home.value("reload")
    except KvasirError as error:
        return error.message
    return ""


def _kind(given: str) -> str:
    if given not in KINDS:
        raise InvalidArgument.of("kind", f"expected one of {', '.join(KINDS)}")
    return given
