"""The audit: each call that needs a privilege has a line, whoever was refused has one, and no call waits for it."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from kvasir.cli.callers.audit import lines_of
from kvasir.errors import NotFound, PermissionDenied, Unauthenticated
from kvasir.server.operating.audit import AuditFile

from tests.cachestore.service.running import RunningStore, StoreHome, make_credentials, publish, store_home
from tests.made_models.synthetic import SMALL, SyntheticAgent

TURN = SyntheticAgent(SMALL, 1).turn(600, is_prompt=True)


@dataclass
class Told:
    """A store that writes its audit, and the tokens of its callers."""

    store: RunningStore
    tokens: dict[str, str]
    file: Path
    seen: int = 0

    def lines(self, at_least: int = 1) -> list[dict[str, Any]]:
        """The lines since the last look, once there are so many."""
        give_up = time.monotonic() + 60
        while len(found := list(lines_of(self.file))[self.seen :]) < at_least and time.monotonic() < give_up:
            time.sleep(0.01)
        self.seen += len(found)
        return found

    def client(self, name: str) -> Any:
        return self.store.client(self.tokens[name])


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Told]:
    root = tmp_path_factory.mktemp("a")
    with store_home(root / "h") as home:
        credentials = root / "credentials.toml"
        tokens = make_credentials(credentials)
        file = root / "audit" / "store.jsonl"
        options = ("--credentials-file", str(credentials), "--audit-file", str(file))
        yield Told(home.start(*options), tokens, file)


def test_changes_are_reported_with_who_what_and_which_agent(told: Told) -> None:
    with told.client("engine") as engine, told.client("client") as client:
        publish(engine, "ada", TURN, 0)
        client.fork_agent("ada", "bob")
        client.list_agents()
        client.delete_agent("bob")
    lines = told.lines(3)
    assert [(line["what"], line["who"], line["agent"], line["outcome"]) for line in lines] == [
        ("CacheStoreService/CommitSnapshot", "engine", "ada", "allowed"),
        ("AgentService/ForkAgent", "client", "bob", "allowed"),
        ("AgentService/DeleteAgent", "client", "bob", "allowed"),
    ]
    assert lines[1]["source_agent"] == "ada"
    assert lines[2]["roles"] == ["client"]
    assert lines[2]["namespace"] == "default"
    assert all(line["request_id"] and line["at"].endswith("+00:00") for line in lines)


def test_an_import_is_recognized_by_the_header_of_its_stream(told: Told) -> None:
    with told.client("engine") as engine, told.client("client") as client:
        publish(engine, "ida", TURN, 0)
        archive = b"".join(client.export_agent("ida"))
        client.import_agent("copy", [archive])
    lines = told.lines(3)
    assert [(line["what"], line["agent"]) for line in lines[-2:]] == [
        ("AgentService/ExportAgent", "ida"),
        ("AgentService/ImportAgent", "copy"),
    ]


def test_refusals_are_reported_with_their_reason(told: Told) -> None:
    with told.client("peer") as peer, pytest.raises(PermissionDenied):
        peer.delete_agent("ada")
    with told.store.client("x" * 43) as stranger, pytest.raises(Unauthenticated):
        stranger.list_agents()
    with told.client("client") as client, pytest.raises(NotFound):
        client.delete_agent("nobody")
    lines = told.lines(3)  # each is written behind its answer: those of other connections may be before it
    assert {(line["who"], line["outcome"], line["reason"]) for line in lines} == {
        ("peer", "refused", "ROLE_REQUIRED"),
        ("", "refused", "BAD_CREDENTIAL"),
        ("client", "refused", "AGENT_NOT_FOUND"),
    }


def test_strangers_hide_no_refusal_of_one_who_is_known(told: Told) -> None:
    with told.store.client("x" * 43) as stranger, told.client("client") as client:
        for _ in range(30):
            with pytest.raises(Unauthenticated):
                stranger.list_agents()
        for _ in range(12):
            with pytest.raises(PermissionDenied):
                client.collect_garbage()
    lines: list[str] = []
    while lines.count("client") < 12 and (more := told.lines()):
        lines += [line["who"] for line in more]
    assert lines.count("client") == 12
    assert lines.count("") < 30


def test_all_that_a_peer_does_is_reported(told: Told) -> None:
    with told.client("peer") as peer:
        peer.list_agents()
    assert [(line["who"], line["what"]) for line in told.lines()] == [("peer", "AgentService/ListAgents")]


def test_no_line_has_a_token_or_a_digest_and_the_file_is_its_owners(told: Told) -> None:
    text = told.file.read_text()
    assert not any(token in text for token in told.tokens.values())
    assert TURN.manifest_digest.hash not in text
    assert told.file.stat().st_mode & 0o777 == 0o600
    assert told.file.parent.stat().st_mode & 0o777 == 0o700


def test_a_store_whose_audit_cannot_be_written_serves_and_reports_it(home: StoreHome, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    store = home.start("--audit-file", str(tmp_path / "file" / "audit.jsonl"))
    with store.client() as client:
        publish(client, "ada", TURN, 0)
        client.delete_agent("ada")
    assert store.stop() == 0
    assert "audit.lost" in store.log


def test_older_lines_are_kept_in_so_many_files_and_no_more(tmp_path: Path) -> None:
    audit = AuditFile(tmp_path / "a.jsonl", max_bytes=1000, kept=2)
    for number in range(100):
        audit.put({"at": "now", "number": number})
    audit.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "a.jsonl.1", "a.jsonl.2"]
    assert all(path.stat().st_size <= 1000 for path in tmp_path.iterdir())
    numbers = [line["number"] for line in lines_of(tmp_path / "a.jsonl")]
    assert numbers == list(range(numbers[0], 100))
    assert (audit.written, audit.lost) == (100, 0)


def test_a_full_disk_loses_lines_and_then_goes_on(tmp_path: Path) -> None:
    """The kernel itself refuses: a file may not become larger than the limit."""
    program = f"""
import resource, signal, time
from pathlib import Path
from kvasir.server.operating.audit import AuditFile
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
audit = AuditFile(Path({str(tmp_path / "a.jsonl")!r}))
def put(number):
    before = audit.written + audit.lost
    audit.put({{"at": "now", "number": number}})
    while audit.written + audit.lost == before:
        time.sleep(0.001)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
for number in range(10):
    put(number)
lost = audit.lost
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
put(10)
audit.close()
print(audit.written, lost, audit.lost)
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=env)
    written, lost, lost_at_last = map(int, done.stdout.split())
    assert lost == lost_at_last > 5
    assert written == 11 - lost
    assert [line["number"] for line in lines_of(tmp_path / "a.jsonl")] == [*range(written - 1), 10]


def test_a_line_that_was_cut_does_not_take_the_next_one_with_it(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"at": "1"}) + '\n{"at": "2", "wh')
    audit = AuditFile(tmp_path / "a.jsonl")
    audit.put({"at": "3"})
    audit.close()
    assert [line["at"] for line in lines_of(tmp_path / "a.jsonl")] == ["1", "3"]
