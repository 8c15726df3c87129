"""`kvasir tokens`: credentials of a home are made, listed and removed; nothing prints a token."""

from pathlib import Path

from kvasir.cli.running.home import Home
from kvasir.cli.running.plan import plan_of
from kvasir.credentials import Principal, read_credentials, read_token

from tests.cli.running import Ended, in_process


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


def test_a_new_namespace_gets_a_credential_of_the_engine_with_which_it_is_started(tmp_path: Path) -> None:
    assert "up" in tokens(tmp_path, "new", "ben", "--namespace", "red").value["then"]
    assert tokens(tmp_path, "new", "eve", "--namespace", "red").value["then"] == "kvasir reload"
    assert tokens(tmp_path, "new", "fay").value["then"] == "kvasir reload"
    file = tmp_path / "tokens" / "engine@red.token"
    known = read_credentials(tmp_path / "credentials.toml")
    assert known.principal_of(read_token(file)) == Principal("engine@red", "red", frozenset({"engine"}))
    argv = plan_of(Home(tmp_path), [], "", "", "127.0.0.1:1", None, None).engine.argv()
    assert [argv[at + 1] for at, word in enumerate(argv) if word == "--store-token-file"] == [f"red={file}"]


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
    tokens(tmp_path, "new", "ben")
    for words in (
        ("new", "ben"),
        ("new", "../ben"),
        ("new", "engine@red"),
        ("new", "eve", "--namespace", "a=b"),
        ("new", "eve", "--role", "engine"),
        ("rm", "client"),
        ("rm", "engine"),
    ):
        assert in_process("--home", str(tmp_path), "tokens", *words, "--json").code != 0, words
    assert [each["name"] for each in tokens(tmp_path, "ls").value["tokens"]] == ["client", "engine", "peer", "ben"]
