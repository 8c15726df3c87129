"""`kvasir tokens`: credentials of a home are made, listed and removed; nothing prints a token."""

import fcntl
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from kvasir.cli.running.home import Home, Running
from kvasir.cli.running.plan import make_credentials, plan_of
from kvasir.cli.settings.asked import Asked
from kvasir.credentials import Principal, further_engine_tokens, read_credentials, read_token
from kvasir.options.up import UpTable

from tests.cli.running import Ended, in_process

# Holds the lock of a `kvasir up` until its input ends.
UP = """
import fcntl, sys
lock = open(sys.argv[1], "w")
fcntl.flock(lock, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""


def tokens(home: Path, *words: str, code: int = 0) -> Ended:
    ended = in_process("--home", str(home), "tokens", *words, "--json")
    assert ended.code == code, ended.err
    return ended


def test_a_token_is_bound_to_a_namespace_and_roles_and_lies_in_a_private_file(tmp_path: Path) -> None:
    made = tokens(tmp_path, "new", "ben", "--namespace", "red", "--role", "client", "--role", "admin")
    file = Path(made.value["token_file"])
    assert file.stat().st_mode & 0o777 == 0o600
    token = read_token(file)
    assert token not in made.out + made.err + tokens(tmp_path, "ls").out
    known = read_credentials(tmp_path / "credentials.toml")
    assert known.principal_of(token) == Principal("ben", "red", frozenset({"client", "admin"}))


@pytest.mark.parametrize("http", ["127.0.0.1:1", ""])
def test_a_new_namespace_gets_a_credential_of_the_engine_with_which_it_is_started(tmp_path: Path, http: str) -> None:
    tokens(tmp_path, "new", "ben", "--namespace", "red")
    file = tmp_path / "tokens" / "engine@red.token"
    known = read_credentials(tmp_path / "credentials.toml")
    assert known.principal_of(read_token(file)) == Principal("engine@red", "red", frozenset({"engine"}))
    plan = plan_of(Asked(Home(tmp_path), UpTable(http=http)))
    argv = plan.engine.argv()
    assert further_engine_tokens(Path(argv[argv.index("--store-token-dir") + 1])) == {"red": file}
    for process in (plan.engine, plan.store):
        assert process.options["credentials_file"] == tmp_path / "credentials.toml"


def test_what_is_to_be_done_then_is_a_command(tmp_path: Path) -> None:
    home, kvasir = Home(tmp_path), f"kvasir --home {tmp_path}"
    assert tokens(tmp_path, "new", "ben").value["then"] == f"{kvasir} up", "nothing runs"
    argv = (sys.executable, "-c", UP, str(home.up_lock_file))
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as up:
        assert up.stdout is not None
        assert up.stdout.readline()
        for token_file, then in ((str(home.tokens / "client.token"), "reload"), ("", f"down, then {kvasir} up")):
            home.write_running(Running(up.pid, "unix:/s", "unix:/e", token_file=token_file))
            assert tokens(tmp_path, "new", f"eve{len(then)}").value["then"] == f"{kvasir} {then}"


def test_a_token_is_drawn_and_not_told_by_its_name_and_what_lies_in_its_place_goes(tmp_path: Path) -> None:
    homes = [tmp_path / "one", tmp_path / "two"]
    left = Home(homes[0]).tokens / "ben.token"
    Home(homes[0]).make()
    left.write_text("as a command leaves it that was killed, and for all to read\n")
    files = [Path(tokens(home, "new", "ben").value["token_file"]) for home in homes]
    assert files[0] == left
    one, other = map(read_token, files)
    assert one != other
    assert min(len(one), len(other)) >= 43, "256 bits"


def test_a_command_waits_for_another_that_changes_the_tokens(tmp_path: Path) -> None:
    tokens(tmp_path, "new", "ben")
    before = (tmp_path / "credentials.toml").read_bytes()
    other = threading.Thread(target=tokens, args=(tmp_path, "new", "eve"))
    directory = os.open(Home(tmp_path).tokens, os.O_RDONLY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        other.start()
        other.join(0.5)
        assert other.is_alive()
        assert (tmp_path / "credentials.toml").read_bytes() == before
    finally:
        os.close(directory)
        other.join()
    assert read_token(tmp_path / "tokens" / "eve.token")


def test_a_home_without_credentials_says_what_makes_them_and_is_not_made(tmp_path: Path) -> None:
    for words in (("ls",), ("rm", "ben")):
        ended = in_process("--home", tmp_path / "none", "tokens", *words)
        assert ended.code == 4
        assert f"has no credentials yet: `kvasir --home {tmp_path}/none up` makes them" in ended.err
    assert not (tmp_path / "none").exists()


def test_a_token_that_is_removed_is_gone_and_the_others_stay(tmp_path: Path) -> None:
    files = [Path(tokens(tmp_path, "new", name).value["token_file"]) for name in ("ben", "eve")]
    removed, stays = map(read_token, files)
    tokens(tmp_path, "rm", "ben")
    known = read_credentials(tmp_path / "credentials.toml")
    assert known.principal_of(removed) is None
    assert known.principal_of(stays) == Principal("eve", "default", frozenset({"client"}))
    assert [file.exists() for file in files] == [False, True]
    assert tokens(tmp_path, "rm", "ben", code=5).value["error"]["reason"] == "NO_SUCH_TOKEN"


def test_names_that_are_taken_or_no_words_or_the_homes_own_are_refused(tmp_path: Path) -> None:
    tokens(tmp_path, "new", "ben", "--namespace", "team")
    made = {file.name: file.read_bytes() for file in Home(tmp_path).tokens.iterdir()}
    for words in (
        ("new", "ben"),
        ("new", "../ben"),
        ("new", "engine@red"),
        ("new", "eve", "--namespace", "a=b"),
        ("new", "eve", "--role", "engine"),
        ("new", "Ben"),
        ("new", "Client"),
        ("new", "Engine"),
        ("new", "Engines"),
        ("new", "eve", "--namespace", "Default"),
        ("new", "eve", "--namespace", "Team"),
        ("new", "owner", "--role", "admin"),
        ("new", "Owner"),
        ("rm", "client"),
        ("rm", "engine"),
        ("rm", "peer"),
    ):
        assert in_process("--home", str(tmp_path), "tokens", *words, "--json").code != 0, words
    names = [each["name"] for each in tokens(tmp_path, "ls").value["tokens"]]
    assert names == ["client", "engine", "peer", "ben", "engine@team"]
    assert {file.name: file.read_bytes() for file in Home(tmp_path).tokens.iterdir()} == made


def test_the_first_tokens_of_a_home_are_made_once_though_two_commands_want_them(tmp_path: Path) -> None:
    for number in range(20):
        home = Home(tmp_path / str(number))
        home.make()
        at_once = threading.Barrier(2)

        def make(home: Home = home, at_once: threading.Barrier = at_once) -> None:
            at_once.wait()
            make_credentials(home)

        with ThreadPoolExecutor() as pool:
            for done in [pool.submit(make), pool.submit(make)]:
                done.result()
        known = read_credentials(home.credentials_file)
        for each in known.principals:
            assert known.principal_of(read_token(home.tokens / f"{each.name}.token")) == each
