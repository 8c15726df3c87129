"""`kvasir tokens`: credentials of a home are made, listed and removed; nothing prints a token."""

import fcntl
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from kvasir import credentials
from kvasir.cli.running.home import Home, Running
from kvasir.cli.running.own_credentials import make_credentials
from kvasir.cli.running.plan import plan_of
from kvasir.cli.settings.asked import Asked
from kvasir.credentials import (
    Credentials,
    Principal,
    further_engine_tokens,
    read_credentials,
    read_token,
    replace_private_text,
    write_private_text,
)
from kvasir.errors import FailedPrecondition
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


def test_a_homes_first_credentials_survive_a_loss_of_power(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, synced = Home(tmp_path), list[tuple[Path, bool]]()
    home.make()
    monkeypatch.setattr(
        credentials, "sync_directory", lambda path: synced.append((path, home.credentials_file.exists()))
    )
    make_credentials(home)
    assert (tmp_path / "tokens", False) in synced, "all tokens are there first"
    assert synced[-1] == (tmp_path, True)


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


def test_a_home_without_credentials_reports_what_makes_them_and_is_not_made(tmp_path: Path) -> None:
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


@pytest.mark.long(2)
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
        ("new", "operator@home", "--role", "admin"),
        ("rm", "operator@home"),
    ):
        assert in_process("--home", str(tmp_path), "tokens", *words, "--json").code != 0, words
    names = [each["name"] for each in tokens(tmp_path, "ls").value["tokens"]]
    assert names == ["client", "operator@home", "engine", "peer", "ben", "engine@team"]
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


OPERATOR = Principal("operator@home", "default", frozenset({"client", "admin"}))


def test_a_home_has_a_key_for_its_operator_alone_beside_its_programs(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.make()
    make_credentials(home)
    files = [home.tokens / f"{name}.token" for name in ("operator@home", "client")]
    assert [file.stat().st_mode & 0o777 for file in files] == [0o600, 0o600]
    known = read_credentials(home.credentials_file)
    operator, client = (known.principal_of(read_token(file)) for file in files)
    assert (operator, client) == (OPERATOR, Principal("client", "default", frozenset({"client", "admin"})))
    plan = plan_of(Asked(home, UpTable(http="127.0.0.1:1")))
    assert plan.gateway is not None
    assert plan.gateway.options["service_admin"] == ("operator@home",), "who operates by the page"
    assert plan.engine.options["service_admin"] == ("client", "operator@home"), "who swaps models, as ever"


def _from_before(home: Home, more: str = "") -> str:
    """Make the home one of a Kvasir that knew no operator; returns its credentials."""
    home.make()
    make_credentials(home)
    (home.tokens / "operator@home.token").unlink()
    text = f"# edited by hand\n{read_credentials(home.credentials_file).without({OPERATOR.name}).text}{more}"
    replace_private_text(home.credentials_file, text)
    return text


def test_a_home_from_before_gets_an_operator_and_keeps_all_else(tmp_path: Path) -> None:
    home = Home(tmp_path)
    before = _from_before(home)
    tokens_before = {file.name: file.read_bytes() for file in home.tokens.iterdir()}
    for _ in range(2):  # the second time nothing is missing
        make_credentials(home)
        text = home.credentials_file.read_text()
        assert text.startswith(before.rstrip())
        known = read_credentials(home.credentials_file)
        assert [each.name for each in known.principals] == ["client", "engine", "peer", "operator@home"]
        token = read_token(home.tokens / "operator@home.token")
        assert known.principal_of(token) == OPERATOR
        assert tokens_before.items() <= {file.name: file.read_bytes() for file in home.tokens.iterdir()}.items()


def test_a_token_that_somebody_called_operator_before_operates_nothing(tmp_path: Path) -> None:
    home = Home(tmp_path)
    named = Credentials(()).with_tokens({Principal("operator", "default", OPERATOR.roles): "x" * 32}).text
    _from_before(home, f"\n{named}")
    write_private_text(home.tokens / "operator.token", "x" * 32)
    make_credentials(home)
    plan = plan_of(Asked(home, UpTable(http="127.0.0.1:1")))
    known = read_credentials(home.credentials_file).principal_of("x" * 32)
    assert plan.gateway is not None
    assert known is not None
    assert known.name not in plan.gateway.argv()
    assert known.name not in plan.engine.argv()


@pytest.mark.parametrize("how", ["gone", "for all to read", "another"])
def test_an_operators_token_that_is_lost_or_seen_is_made_again(tmp_path: Path, how: str) -> None:
    home = Home(tmp_path)
    home.make()
    make_credentials(home)
    file = home.tokens / "operator@home.token"
    old = read_token(file)
    client = read_token(home.tokens / "client.token")
    if how == "gone":
        file.unlink()
    elif how == "another":
        file.write_text("left-by-a-command-that-was-killed-00000000\n")
    else:
        file.chmod(0o644)
    make_credentials(home)
    known = read_credentials(home.credentials_file)
    assert known.principal_of(read_token(file)) == OPERATOR
    assert known.principal_of(old) is None
    assert known.principal_of(client) is not None
    assert len(known) == 4


def test_credentials_that_cannot_be_read_are_named_and_stay(tmp_path: Path) -> None:
    home = Home(tmp_path)
    _from_before(home, "no TOML")
    before = home.credentials_file.read_bytes()
    with pytest.raises(FailedPrecondition, match=r"credentials\.toml: not TOML") as refused:
        make_credentials(home)
    assert refused.value.reason == "UNUSABLE_CREDENTIALS"
    assert home.credentials_file.read_bytes() == before
