"""The conformance program of the Python client: see README.md beside it for what each call takes and answers."""

import json
import sys
from concurrent import futures
from pathlib import Path
from typing import Any

from kvasir.cachestore.v1 import cachestore_pb2 as store_pb
from kvasir.clients import InferenceClient, Reply, Tls
from kvasir.errors import KvasirError
from kvasir.formats.digest import Digest
from kvasir.inference.v1 import inference_pb2 as pb
from kvasir.status import answer_to

Call = dict[str, Any]
_TURN = (
    *("agent_id", "max_tokens", "request_id", "expected_version", "model", "regex"),
    *("base_version", "memory_mode", "expect_existing", "replace_memory"),
)


class PythonProgram:
    """Does what it is told with the Python client."""

    def __init__(self) -> None:
        self._client: InferenceClient | None = None

    def answer(self, call: Call) -> Call:
        try:
            return {"id": call["id"], "ok": getattr(self, f"_{call['call']}")(call)}
        except KvasirError as error:
            return {"id": call["id"], "error": _told(error)}

    @property
    def _engine(self) -> InferenceClient:
        assert self._client is not None
        return self._client

    def _connect(self, call: Call) -> Call:
        if self._client is not None:
            self._client.close()
        tls = Tls(Path(call["ca_file"]), server_name=call.get("server_name", "")) if "ca_file" in call else None
        self._client = InferenceClient.connect(call["address"], token=call.get("token"), tls=tls)
        self._client.engines = [InferenceClient.connect(each) for each in call.get("engines", ())]
        return {}

    def _count(self, call: Call) -> Call:
        return {"tokens": self._engine.count_tokens(**_input(call))}

    def _embed(self, call: Call) -> Call:
        answer = self._engine.embed(call["texts"], **_given(call, "model", "dimensions", "truncate"))
        embeddings = [{"values": list(each.values), "tokens": each.tokens} for each in answer.embeddings]
        return {"model": answer.model, "embeddings": embeddings}

    def _reply(self, call: Call) -> Call:
        reply = self._engine.reply(**_turn(call))
        started, finished = reply.started, reply.finished
        return {
            "text": reply.text,
            "prompt_tokens": started.prompt_tokens,
            "cached_tokens": started.cached_tokens,
            "source": pb.CacheSource.Name(started.source),
            "continuation": pb.Continuation.Name(started.continuation),
            "parent_version": started.parent_version,
            "version": finished.snapshot.version,
            "finish_reason": pb.FinishReason.Name(finished.reason),
            "request_id": started.request_id,
        }

    def _stream(self, call: Call) -> Call:
        reply, deltas = Reply(), 0
        token = call.get("resume_token")
        events = self._engine.generate(**_turn(call)) if token is None else self._engine.resume(token)
        for event in events:
            reply.add(event)
            deltas += event.HasField("delta")
            if deltas == call.get("cancel_after"):
                events.close()
        is_finished = reply.finished.reason != pb.FINISH_REASON_UNSPECIFIED
        version = reply.finished.snapshot.version
        return {"text": reply.text, "deltas": deltas, "is_finished": is_finished, "version": version}

    def _streams(self, call: Call) -> Call:
        with futures.ThreadPoolExecutor(call["count"]) as pool:
            replies = [pool.submit(self._engine.reply, **_turn(call)) for _ in range(call["count"])]
        return {"finished": len([reply.result() for reply in replies])}

    def _list_hot_memories(self, call: Call) -> Call:
        found = self._engine.list_hot_memories(call["agent_ids"])
        names = ("agent_id", "tokens", "version", "is_stored")
        return {"memories": [{name: getattr(memory, name) for name in names} for memory in found]}

    def _usage(self, call: Call) -> Call:
        usage = self._engine.get_usage(call["agent_id"])
        names = ("agent_count", "snapshot_count", "blob_bytes", "shared_bytes")
        return {name: getattr(usage, name) for name in names}

    def _list_turns(self, call: Call) -> Call:
        turns = self._engine.list_turns()
        names = pb.TurnState.Name
        return {
            "turns": [
                {"request_id": turn.request_id, "agent_id": turn.agent_id, "state": names(turn.state)} for turn in turns
            ]
        }

    def _cancel_turn(self, call: Call) -> Call:
        ended = self._engine.cancel_turn(call["request_id"])
        return {"finish_reasons": [pb.FinishReason.Name(finished.reason) for finished in ended]}

    def _warm(self, call: Call) -> Call:
        warm = self._engine.warm(agent_id=call["agent_id"], timeout_s=call.get("timeout_s"))
        source = pb.CacheSource.Name(warm.source)
        return {"tokens": warm.tokens, "cached_tokens": warm.cached_tokens, "source": source, "version": warm.version}

    def _list_agents(self, call: Call) -> Call:
        names: list[str] = []
        page_token = ""
        while True:
            page = self._engine.list_agents(**_given(call, "name_prefix", "page_size"), page_token=page_token)
            names += [agent.agent_id for agent in page.agents]
            page_token = page.next_page_token
            if not page_token:
                return {"agent_ids": names}

    def _get_agent(self, call: Call) -> Call:
        agent = self._engine.get_agent(call["agent_id"])
        line = agent.lines[0]
        return {"agent_id": agent.agent_id, "version": line.version, "token_count": line.token_count}

    def _fork(self, call: Call) -> Call:
        agent = self._engine.fork_agent(call["source_agent_id"], call["agent_id"], **_given(call, "version"))
        return {"agent_id": agent.agent_id, "version": agent.lines[0].version}

    def _rollback(self, call: Call) -> Call:
        given = _given(call, "expected_version")
        return {"version": self._engine.rollback_agent(call["agent_id"], call["version"], **given).version}

    def _delete(self, call: Call) -> Call:
        self._engine.delete_agent(call["agent_id"], **_given(call, "force"))
        return {}

    def _export(self, call: Call) -> Call:
        path = Path(call["file"])
        self._engine.export_to_file(call["agent_id"], path, **_given(call, "version"))
        digest = Digest.of(path.read_bytes())
        return {"hash": digest.hash, "size_bytes": digest.size_bytes}

    def _import(self, call: Call) -> Call:
        given = _given(call, "replace")
        return _brought(self._engine.import_from_file(call["agent_id"], Path(call["file"]), **given))

    def _pull(self, call: Call) -> Call:
        given = _given(call, "local_agent_id", "timeout_s")
        return _brought(self._engine.pull_agent(call["peer"], call["agent_id"], **given))


def _given(call: Call, *names: str) -> Call:
    return {name: call[name] for name in names if name in call}


def _input(call: Call) -> Call:
    found = _given(call, "prompt")
    for name in ("messages", "append_messages"):
        if name in call:
            found[name] = [{"role": each["role"], "content": each["text"]} for each in call[name]]
    return found


def _turn(call: Call) -> Call:
    sampling = {"sampling": _given(call, "n")} if "n" in call else {}
    return {**_input(call), **_given(call, *_TURN, "timeout_s"), **sampling}


def _brought(snapshot: store_pb.SnapshotVersion) -> Call:
    return {"version": snapshot.version, "origin": store_pb.Origin.Name(snapshot.origin)}


def _told(error: KvasirError) -> Call:
    return {
        "code": answer_to(error).code.name,
        "reason": error.reason,
        "field": error.field or "",
        "retry_after_s": error.retry_after_s,
        "metadata": error.metadata,
        "message": error.message,
    }


def main() -> None:
    """Answer every line of standard input."""
    program = PythonProgram()
    for line in sys.stdin:
        sys.stdout.write(json.dumps(program.answer(json.loads(line)), ensure_ascii=False) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
