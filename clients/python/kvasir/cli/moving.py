"""`kvasir agents move | sync | pull | claim`: agents change hands between paired stores, or are copied."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

import typer
from rich.console import Console

from kvasir.cachestore.v1 import cachestore_pb2 as pb
from kvasir.cli import agents, failures
from kvasir.cli.agents import (
    AgentArgument,
    LabelOption,
    LineOption,
    arrived_words,
    complete_agent,
    labels_of,
    store_client,
)
from kvasir.cli.caller import Caller
from kvasir.cli.engine import engine_client
from kvasir.cli.rows import agent_row, counted, size, snapshot_row
from kvasir.cli.showing.arguments import argument, option
from kvasir.cli.showing.progress import transfer_progress
from kvasir.clients import InferenceClient, StoreClient
from kvasir.errors import FailedPrecondition, Internal, KvasirError, NotFound, Unavailable
from kvasir.waits import PAUSE_S, SOON_S

FromOption = Annotated[str, option("Bring it here from this peer.", "--from", metavar="PEER")]
ToOption = Annotated[str, option("Give it to this peer.", "--to", metavar="PEER")]
DryRunOption = Annotated[bool, option("Show what would be copied, and copy nothing.", "--dry-run")]
OnProgress = Callable[[pb.TransferProgress], None]
_TRIES = 3  # to hand a turn over that is refused for now


def move(
    caller: Caller,
    agent: AgentArgument,
    from_peer: FromOption = "",
    to_peer: ToOption = "",
    dry_run: DryRunOption = False,
) -> None:
    """Move an agent to or from another Mac: its memory, and the right to continue it. A read-only copy stays.

    With --to, a decoding turn moves along to a paired Mac that accepts moves, unnoticed by its reader, unless it is the
    agent's first turn; otherwise the move waits for the turn's end. If the move is interrupted, the agent stays or
    arrives whole; repeat the command to continue."""
    peer = _one_of(from_peer, to_peer)
    way = f"from {peer}" if from_peer else f"to {peer}"
    with store_client(caller) as client:
        turn = _turn_handed_over(caller, client, agent, to_peer) if to_peer and not dry_run else None
        sent = _Sent()
        with transfer_progress(caller, f"{agent} {way}") as on_progress:
            steps = client.moving_agent(agent, from_peer=from_peer, to_peer=to_peer, dry_run=dry_run)
            waits = f"waiting until the engine there has stored {agent}'s turn …"
            done = sent.follow(steps, on_progress, lambda: caller.say(waits))
    if done is None and not dry_run:
        raise Internal("the move ended without saying how")
    turn = turn or ("waited_for" if sent.has_waited else None)
    head: dict[str, Any] = {"agent_id": agent, "peer": peer, "dry_run": dry_run, "turn": turn}
    row = {**head, **_sent_row(sent, dry_run)}
    if done is not None:
        row["agent"] = agent_row(done)
    caller.result(row, _moved_words(agent, way, turn, sent, dry_run))


def sync(
    caller: Caller,
    names: Annotated[
        list[str] | None, argument("Default: every agent here.", "AGENT", autocompletion=complete_agent)
    ] = None,
    from_peer: FromOption = "",
    to_peer: ToOption = "",
    label: LabelOption = None,
    dry_run: DryRunOption = False,
) -> None:
    """Copy new versions of agents to or from another Mac. Owners do not change; agents that changed at both are
    skipped."""
    peer = _one_of(from_peer, to_peer)
    rows = list[dict[str, Any]]()
    with store_client(caller) as client:
        for agent in _chosen(client, names or [], labels_of(label or [])):
            with transfer_progress(caller, agent.agent_id) as on_progress:
                rows.append(_synced(client, agent, from_peer, to_peer, dry_run, on_progress))
    caller.result(rows, lambda out: _show(out, rows, peer, dry_run))
    if any(row["error"] for row in rows):
        raise typer.Exit(failures.REFUSED)


def pull(
    caller: Caller,
    peer: Annotated[str, argument("A peer of the store's configuration.", "PEER")],
    agent: AgentArgument,
    as_: Annotated[str, option("The agent's name here. Default: the same name.", "--as", metavar="NAME")] = "",
    line: LineOption = "",
    dry_run: DryRunOption = False,
) -> None:
    """Copy an agent's memory from another store, which sends only the blobs that are missing here."""
    sent = _Sent()
    with store_client(caller) as client, transfer_progress(caller, f"{agent} from {peer}") as on_progress:
        steps = client.pulling_agent(peer, agent, local_agent_id=as_, kv_identity_hash=line, dry_run=dry_run)
        made = sent.follow(steps, on_progress)
    if made is None and not dry_run:
        raise Internal("the pull ended without saying how")
    if dry_run:
        row = {"agent_id": as_ or agent, "peer": peer, "dry_run": True, **_sent_row(sent, dry_run)}
        caller.result(row, f"{agent} would come from {peer}: {_sent_words(sent, dry_run)}")
    else:
        caller.result(snapshot_row(made), f"{arrived_words(made)}; {_sent_words(sent, dry_run)}")


def claim(
    caller: Caller,
    agent: Annotated[str, argument("The agent's name.", "AGENT", autocompletion=complete_agent)] = "",
    recovered: Annotated[
        bool, option("All agents that wait for a claim since `kvasir store recover`.", "--recovered")
    ] = False,
    force: Annotated[
        bool,
        option("Also from a Mac that is gone for good. Versions that it made since then are lost here.", "--force"),
    ] = False,
) -> None:
    """Take back an agent whose move stopped halfway, or, with --force, whose owner is gone.

    If that Mac comes back, it keeps its versions for reading, and no longer extends the agent. After a recovery the
    store first queries every peer: an agent that a peer owns stays there."""
    if bool(agent) == recovered:
        raise failures.WrongUsage("expected AGENT or --recovered", field="agent")
    with store_client(caller) as client:
        if not recovered:
            claimed = _claimed(client, agent, force)
            caller.result(agent_row(claimed), f"{agent} is this store's.")
            return
        rows = [_claimed_row(client, name, force) for name in agents.unclaimed(client)]
    told = [row["message"] or f"{row['agent_id']} is this store's." for row in rows]
    told.append(f"{counted(len(rows), 'agent')}, {sum(bool(row['error']) for row in rows)} left alone")
    caller.result(rows, "\n".join(told))
    if any(row["error"] for row in rows):
        raise typer.Exit(failures.REFUSED)


def _claimed_row(client: StoreClient, agent: str, force: bool) -> dict[str, str]:
    """One that is refused, as when a peer owns it, does not end the others."""
    try:
        client.claim_agent(agent, force=force)
    except FailedPrecondition as refused:
        return {"agent_id": agent, "error": refused.reason or "", "message": refused.message}
    return {"agent_id": agent, "error": "", "message": ""}


def _claimed(client: StoreClient, agent: str, force: bool) -> pb.Agent:
    try:
        return client.claim_agent(agent, force=force)
    except FailedPrecondition as refused:
        if refused.reason == "AGENT_MOVED" and not force:
            way = f"; if that Mac is gone for good, `kvasir agents claim {agent} --force` makes it this one's"
            raise FailedPrecondition(refused.message + way, reason=refused.reason, metadata=refused.metadata) from None
        raise


@dataclass
class _Sent:
    """The bytes that were sent, of all that are needed."""

    progress: pb.TransferProgress = field(default_factory=pb.TransferProgress)
    skipped_bytes: int | None = None  # those that were here before the first blob came
    has_waited: bool = False  # for a turn's end
    began_s: float = field(default_factory=time.monotonic)

    def follow(
        self, steps: Iterable[Any], on_progress: OnProgress, on_waiting: Callable[[], None] = lambda: None
    ) -> Any:
        """The agent or version with which the steps of a pull or a move end; None for a dry run."""
        done = None
        for step in steps:
            if step.HasField("done"):
                done = step.done  # read on: a stream that is left before its end counts as cancelled
            elif step.HasField("progress"):
                if self.skipped_bytes is None:
                    self.skipped_bytes = step.progress.bytes_done
                self.progress.CopyFrom(step.progress)
                on_progress(step.progress)
            elif not self.has_waited:
                self.has_waited = True
                on_waiting()
        return done


def _turn_handed_over(caller: Caller, client: StoreClient, agent: str, peer: str) -> str | None:
    """Hand the agent's decoding turn over to the engine there. What became of it, if the store need not wait for it."""
    if not caller.is_engine_of_store:
        return None
    try:
        with engine_client(caller) as engine:
            for tries_left in reversed(range(_TRIES)):
                try:
                    engine.hand_over(peer, agent_id=agent)
                except KvasirError as error:
                    if error.reason in ("TURN_NOT_FOUND", Unavailable.reason):  # no turn, or no engine
                        return None if tries_left == _TRIES - 1 else "waited_for"
                    caller.say(f"{agent}'s turn is not handed over: {error.message}")
                    if peer not in client.get_capabilities().peers:
                        return None  # the move will be refused
                    if not tries_left or error.retry_after_s is None:
                        return _waited_for(caller, client, engine, agent)
                    time.sleep(min(error.retry_after_s, SOON_S))  # the turn goes on meanwhile
                else:
                    return "handed_over"
    except Unavailable as error:  # it ended meanwhile
        caller.say(f"{agent}'s turn is not handed over: {error.message}")
    return None


def _waited_for(caller: Caller, client: StoreClient, engine: InferenceClient, agent: str) -> str:
    """The store waits for the turn of an agent that it has; one in its first turn it does not know."""
    caller.say("its end is waited for")
    while _is_unknown(client, agent) and any(turn.agent_id == agent for turn in engine.list_turns()):
        time.sleep(PAUSE_S)
    return "waited_for"


def _is_unknown(client: StoreClient, agent: str) -> bool:
    try:
        client.get_agent(agent)
    except NotFound:
        return True
    return False


def _synced(
    client: StoreClient, agent: pb.Agent, from_peer: str, to_peer: str, dry_run: bool, on_progress: OnProgress
) -> dict[str, Any]:
    """Copy every line, the newest last; a refused line is reported and does not end the others."""
    sent, error, message = list[_Sent](), "", ""
    for line in sorted(agent.lines, key=lambda each: each.version):
        sent.append(_Sent())
        try:
            begin = partial(client.pulling_agent, from_peer) if from_peer else partial(client.copying_agent, to_peer)
            steps = begin(agent.agent_id, kv_identity_hash=line.kv_identity_hash, dry_run=dry_run)
            sent[-1].follow(steps, on_progress)
        except KvasirError as refused:
            if not refused.reason or refused.reason in ("PEER_UNAVAILABLE", "PEER_UNKNOWN", "PEER_REFUSED"):
                raise
            error, message = error or refused.reason, message or refused.message
    told = {"error": error, "message": message}
    of_lines = [_sent_row(each, dry_run) for each in sent]
    total = {name: sum(row[name] for row in of_lines) for name in _sent_row(_Sent(), dry_run)}
    return {"agent_id": agent.agent_id, **told, "dry_run": dry_run, **total}


def _chosen(client: StoreClient, names: Iterable[str], labels: dict[str, str]) -> list[pb.Agent]:
    if named := [client.get_agent(name) for name in names]:
        return [agent for agent in named if labels.items() <= dict(agent.labels).items()]
    return list(client.every_agent(labels=labels))


def _one_of(from_peer: str, to_peer: str) -> str:
    if bool(from_peer) == bool(to_peer):
        raise failures.WrongUsage("expected one of --from PEER and --to PEER", field="peer")
    return from_peer or to_peer


def _sent_row(sent: _Sent, dry_run: bool) -> dict[str, int]:
    progress, skipped = sent.progress, sent.skipped_bytes or 0
    blobs = {"blobs": progress.blobs_total, "blobs_skipped": progress.blobs_skipped}
    sent_bytes = (progress.bytes_total if dry_run else progress.bytes_done) - skipped
    return {**blobs, "bytes": progress.bytes_total, "bytes_sent": sent_bytes}


def _moved_words(agent: str, way: str, turn: str | None, sent: _Sent, dry_run: bool) -> str:
    if turn == "handed_over":
        return f"{agent} has moved {way} while it generates: its turn goes on there"
    verb = "would move" if dry_run else "has moved"
    return f"{agent} {verb} {way}{' after the end of its turn' if turn else ''}: {_sent_words(sent, dry_run)}"


def _sent_words(sent: _Sent, dry_run: bool) -> str:
    row = _sent_row(sent, dry_run)
    there = row["bytes"] - row["bytes_sent"]
    words = f"{size(row['bytes_sent'])} {'to send' if dry_run else 'sent'}"
    words += "" if dry_run else f" in {time.monotonic() - sent.began_s:.1f} s"
    return f"{words}, {size(there)} were there" if there else words


def _show(out: Console, rows: list[dict[str, Any]], peer: str, dry_run: bool) -> None:
    for row in rows:
        what = row["message"] or f"{size(row['bytes_sent'])}{' to send' if dry_run else ' sent'}"
        out.print(f"{row['agent_id']}: {what}")
    out.print(f"{counted(len(rows), 'agent')}, {sum(bool(row['error']) for row in rows)} left alone, with {peer}")
