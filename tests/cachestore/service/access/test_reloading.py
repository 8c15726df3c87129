"""SIGHUP: who was removed is out at once, also in a stream; who stays notices nothing; a wrong file changes nothing."""

import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from kvasir.cli.callers.audit import lines_of
from kvasir.credentials import CLIENT, ENGINE, PEER, Principal, replace_private_text, write_private_text
from kvasir.errors import KvasirError, PermissionDenied, Unauthenticated

from tests.cachestore.service.running import RunningStore, make_credentials, publish, store_home
from tests.made_models.synthetic import SyntheticAgent, full_layers, kv_identity

LARGE = kv_identity("large", full_layers(24, 8, 128))
ADA, BOB = Principal("ada", "default", frozenset({CLIENT})), Principal("bob", "default", frozenset({CLIENT}))


@dataclass
class Reloadable:
    """A store, its credential file, and what it says of reloads."""

    store: RunningStore
    credentials: Path
    audit: Path

    def write(self, *principals: Principal, text: str = "") -> dict[str, str]:
        self.credentials.unlink(missing_ok=True)
        tokens = make_credentials(self.credentials, principals) if principals else {}
        if text:
            self.credentials.write_text(text)
            self.credentials.chmod(0o600)
        return tokens

    def hang_up(self) -> dict[str, object]:
        """SIGHUP; the line that tells of it."""
        before = len(list(lines_of(self.audit)))
        self.store.process.send_signal(signal.SIGHUP)
        line: dict[str, object] = wait_for(
            lambda: next((line for line in list(lines_of(self.audit))[before:] if line["what"] == "reload"), None)
        )
        return line


def wait_for(look: Callable[[], object]) -> object:
    give_up = time.monotonic() + 60
    while (found := look()) is None:
        assert time.monotonic() < give_up
        time.sleep(0.01)
    return found


@pytest.fixture
def reloadable(tmp_path: Path) -> Iterator[Reloadable]:
    with store_home(tmp_path / "h") as home:
        credentials, audit = tmp_path / "credentials.toml", tmp_path / "audit.jsonl"
        make_credentials(credentials, [ADA, BOB])
        store = home.start("--credentials-file", str(credentials), "--audit-file", str(audit))
        yield Reloadable(store, credentials, audit)


class Watch(threading.Thread):
    """A stream of events, and how it ended."""

    def __init__(self, store: RunningStore, token: str) -> None:
        super().__init__(daemon=True)
        self.seen: queue.Queue[object] = queue.Queue()
        self._client = store.client(token)
        self.start()
        self.seen.get(timeout=60)  # it has begun

    def run(self) -> None:
        try:
            for event in self._client.watch():
                self.seen.put(event)
        except KvasirError as error:
            self.seen.put(error)


def test_who_was_removed_is_out_at_once_and_who_stays_notices_nothing(reloadable: Reloadable) -> None:
    tokens = reloadable.write(ADA, BOB)
    reloadable.hang_up()
    watches = {name: Watch(reloadable.store, tokens[name]) for name in ("ada", "bob")}
    kept = reloadable.credentials.read_text().split("[[credential]]")
    reloadable.write(text="[[credential]]" + next(part for part in kept if '"bob"' in part))
    line = reloadable.hang_up()
    assert (line["outcome"], line["parts"], line["ended_calls"]) == ("allowed", "credentials peers", "1")
    ended = watches["ada"].seen.get(timeout=60)
    assert isinstance(ended, Unauthenticated)
    assert ended.reason == "CREDENTIAL_REVOKED"
    with reloadable.store.client(tokens["ada"]) as client, pytest.raises(Unauthenticated):
        client.list_agents()
    with reloadable.store.client(tokens["bob"]) as client:
        client.list_agents()
    assert watches["bob"].is_alive()
    assert watches["bob"].seen.empty()


@pytest.mark.long(3)
def test_a_peer_with_a_token_that_lost_a_right_is_cut_off_and_may_come_again(tmp_path: Path) -> None:
    big, book = SyntheticAgent(LARGE, 3).turn(256 * 4), tmp_path / "peers.toml"
    entry = '[[peer]]\nname = "bob"\naddress = "127.0.0.1:1"\n'
    write_private_text(book, entry + 'gives = ["default=move"]\n')
    roles = frozenset({CLIENT, ENGINE}), frozenset({PEER})
    who = [Principal(name, "default", each) for name, each in zip(("ada", "bob"), roles, strict=True)]
    tokens = make_credentials(tmp_path / "credentials", who)
    with store_home(tmp_path / "h") as home:
        store = home.start("--credentials-file", str(tmp_path / "credentials"), "--peers-file", str(book))
        with store.client(tokens["ada"]) as ada, store.client(tokens["bob"]) as bob, store.client() as owner:
            publish(ada, "ada", big, 0)
            ours, theirs = (caller.get_blobs(big.digests) for caller in (ada, bob))
            next(ours)
            next(theirs)
            owner.reload_peers()
            replace_private_text(book, entry)
            assert owner.reload_peers().ended_calls == 1
            with pytest.raises(Unauthenticated) as ended:
                list(theirs)
            assert ended.value.reason == "CREDENTIAL_REVOKED"
            with pytest.raises(PermissionDenied) as refused:
                bob.offer_agent("ada", "ab" * 8, 0)
            assert refused.value.reason == "PEER_MAY_NOT"
            assert len(list(bob.get_blobs(big.digests[:1]))) == len(list(ada.get_blobs(big.digests[:1])))
            next(ours)


def test_a_changed_role_and_a_new_token_hold_from_the_reload_on(reloadable: Reloadable) -> None:
    old = reloadable.write(ADA)
    reloadable.hang_up()
    watch = Watch(reloadable.store, old["ada"])
    text = reloadable.credentials.read_text()
    changed = Principal("ada", "default", frozenset({ENGINE}))
    new = reloadable.write(changed, BOB)  # the same token, another role
    assert new["ada"] == old["ada"]
    reloadable.hang_up()
    assert isinstance(watch.seen.get(timeout=60), Unauthenticated)
    with reloadable.store.client(new["bob"]) as client:
        client.list_agents()
    assert text != reloadable.credentials.read_text()


@pytest.mark.parametrize("text", ["[[credential", "", '[[credential]]\nname = "x"\n'])
def test_a_file_that_is_wrong_keeps_the_old_set_and_is_reported(reloadable: Reloadable, text: str) -> None:
    tokens = reloadable.write(ADA)
    reloadable.hang_up()
    watch = Watch(reloadable.store, tokens["ada"])
    reloadable.write(text=text)
    line = reloadable.hang_up()
    assert (line["outcome"], line["reason"], line["parts"]) == ("refused", "UNUSABLE_CREDENTIALS", "peers")
    assert "reload.refused" in reloadable.store.log
    with reloadable.store.client(tokens["ada"]) as client:
        client.list_agents()
    assert watch.is_alive()
