"""What both services share at the edge, without a network: names, credentials, addresses."""

import errno
import os
import signal
import stat
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvasir import credentials
from kvasir.address import AddressError, parse_address
from kvasir.credentials import (
    CredentialFileError,
    Credentials,
    Principal,
    hash_token,
    read_credentials,
    read_token,
    replace_private_text,
    write_credentials,
    write_private_text,
)
from kvasir.errors import InvalidArgument
from kvasir.names import check_agent_id, check_namespace, check_request_id

# --- names ---

REFUSED_NAMES = [
    *(
        "",
        "x" * 257,
        "ü" * 129,
        "a\0",
        "a\n",
        "\x7f",
        "a\x9f",
        "\u200b",
        "a\u202eb",
        "a\ufeff",
        "\u2028",
        "\u2029",
        "\u00ad",
    ),
    *(unicodedata.normalize("NFD", "Zoë"), "\u212b", "\ud800", "e\u0301", "x" * (1 << 20)),
]


@pytest.mark.parametrize("name", ["a", "Ada", "../..", "日本語", "Zoë", "🐍", "x" * 256, "ü" * 128, " ", "a b", "ﬁ"])
def test_names_are_data(name: str) -> None:
    assert check_agent_id(name) == name
    assert check_namespace(name) == name


@pytest.mark.parametrize("name", REFUSED_NAMES)
def test_names_that_hide_or_have_twins_are_refused(name: str) -> None:
    for check in (check_agent_id, check_namespace):
        with pytest.raises(InvalidArgument) as caught:
            check(name, "some.field")
        assert caught.value.field == "some.field"
        assert len(caught.value.message) < 200


@given(st.text(max_size=40))
def test_two_accepted_names_that_are_equivalent_are_equal(name: str) -> None:
    try:
        check_agent_id(name)
    except InvalidArgument:
        return
    assert unicodedata.normalize("NFC", unicodedata.normalize("NFD", name)) == name


def test_request_ids_are_printable_ascii() -> None:
    assert check_request_id("r-1 x~") == "r-1 x~"
    for text in ("", "x" * 129, "ü", "a\n", "\x7f"):
        with pytest.raises(InvalidArgument):
            check_request_id(text)


# --- credentials ---

ADA = Principal("ada", "Zoë's", frozenset({"engine", "client"}))
BOB = Principal('b"o\\b', "default", frozenset({"peer"}))


def tokens_of(path: Path) -> dict[str, str]:
    made = iter(f"{n}" * 40 for n in range(10))
    return write_credentials(path, [ADA, BOB], lambda: next(made))


def test_a_token_belongs_to_its_principal_and_is_in_no_file(tmp_path: Path) -> None:
    file = tmp_path / "new" / "credentials.toml"
    tokens = tokens_of(file)
    credentials = read_credentials(file)
    assert credentials.principal_of(tokens["ada"]) == ADA
    assert credentials.principal_of(tokens[BOB.name]) == BOB
    for wrong in ("", tokens["ada"][:-1], tokens["ada"] + "0", hash_token(tokens["ada"]), "\ud800"):
        assert credentials.principal_of(wrong) is None
    assert tokens["ada"] not in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


def test_every_entry_is_compared_whichever_matches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import hmac

    tokens = tokens_of(tmp_path / "c.toml")
    credentials = read_credentials(tmp_path / "c.toml")
    compared: list[bytes] = []
    real = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append(b) or real(a, b))
    for token in (tokens["ada"], tokens[BOB.name], "wrong"):
        compared.clear()
        credentials.principal_of(token)
        assert len(compared) == 2


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644, 0o610])
def test_a_file_that_others_can_read_is_refused(mode: int, tmp_path: Path) -> None:
    tokens_of(tmp_path / "c.toml")
    (tmp_path / "c.toml").chmod(mode)
    with pytest.raises(CredentialFileError, match="chmod 600"):
        read_credentials(tmp_path / "c.toml")
    with pytest.raises(CredentialFileError, match="chmod 600"):
        read_token(tmp_path / "c.toml")


def test_a_file_in_use_is_not_replaced(tmp_path: Path) -> None:
    tokens_of(tmp_path / "c.toml")
    with pytest.raises(FileExistsError):
        tokens_of(tmp_path / "c.toml")


ENTRY = f'[[credential]]\nname = "a"\ntoken_blake3 = "{"0" * 64}"\nroles = ["client"]\nnamespace = "default"\n'


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[[",
        "other = 1\n" + ENTRY,
        "credential = 3",
        ENTRY.replace('name = "a"\n', ""),
        ENTRY + "extra = 1\n",
        ENTRY.replace("0" * 64, "0" * 63),
        ENTRY.replace("0" * 64, "A" * 64),
        ENTRY.replace('"client"', '"root"'),
        ENTRY.replace('["client"]', "[]"),
        ENTRY.replace('["client"]', '"client"'),
        ENTRY.replace('"default"', '""'),
        ENTRY.replace('"default"', '"a\\u0000b"'),
        ENTRY.replace('"default"', "3"),
        ENTRY + ENTRY,
        ENTRY + ENTRY.replace("0" * 64, "1" * 64),
        ENTRY + ENTRY.replace('"a"', '"b"'),
    ],
)
def test_a_malformed_credential_file_is_refused(text: str, tmp_path: Path) -> None:
    write_private_text(tmp_path / "c.toml", text)
    with pytest.raises(CredentialFileError):
        read_credentials(tmp_path / "c.toml")


def test_token_files_hold_one_token(tmp_path: Path) -> None:
    write_private_text(tmp_path / "good", "abc\n")
    assert read_token(tmp_path / "good") == "abc"
    for name, text in (("empty", "\n"), ("two", "a b"), ("binary", "ü"), ("lines", "a\nb")):
        write_private_text(tmp_path / name, text)
        with pytest.raises(CredentialFileError):
            read_token(tmp_path / name)
    with pytest.raises(CredentialFileError):
        read_token(tmp_path / "absent")


def test_a_private_file_and_its_new_directories_survive_a_loss_of_power(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, fsync = list[int](), os.fsync

    def noting(descriptor: int) -> None:
        fsync(descriptor)
        synced.append(os.fstat(descriptor).st_ino)

    monkeypatch.setattr(os, "fsync", noting)
    path = tmp_path / "home" / "keys" / "seal.key"
    write_private_text(path, "secret")
    wanted = [path, path.parent, path.parent.parent, tmp_path]
    assert synced == [each.stat().st_ino for each in wanted]


def test_a_kill_while_a_private_file_is_made_leaves_no_half_of_it(tmp_path: Path) -> None:
    """A key of half its digits would end every later start."""
    path = tmp_path / "seal.key"
    program = (
        "import os, signal, sys; from pathlib import Path; from kvasir.credentials import write_private_text; "
        "os.fdopen = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL); "
        "write_private_text(Path(sys.argv[1]), 'secret')"
    )
    ended = subprocess.run([sys.executable, "-c", program, str(path)], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert not path.exists()
    write_private_text(path, "secret")
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode), path.stat().st_nlink) == ("secret", 0o600, 1)


def test_two_who_replace_a_private_file_at_once_both_end_and_a_full_disk_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "open.html"
    real, second = credentials.sync, [lambda: replace_private_text(path, "second")]

    def meanwhile(descriptor: int) -> None:
        if second:
            second.pop()()
        real(descriptor)

    monkeypatch.setattr(credentials, "sync", meanwhile)
    replace_private_text(path, "first")
    assert path.read_text() == "first", "that of the last to end"

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(credentials, "sync", full)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        replace_private_text(path, "third")
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("open.html", "first")]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_private_file_replaces_nothing_also_where_there_are_no_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*_: object) -> None:
        raise PermissionError(errno.EPERM, "links are not supported")

    monkeypatch.setattr(os, "link", no_links)
    write_private_text(tmp_path / "key", "first")
    for name in ("key", "link"):
        if name == "link":
            (tmp_path / name).symlink_to(tmp_path / "nowhere")
        with pytest.raises(FileExistsError):
            write_private_text(tmp_path / name, "second")
    assert (tmp_path / "key").read_text() == "first"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["key", "link"]


def test_no_credentials_know_nobody() -> None:
    assert Credentials([]).principal_of("x") is None


# --- addresses ---


def test_addresses_are_read_as_people_write_them() -> None:
    assert parse_address("unix:/run/s.sock").socket_path == Path("/run/s.sock")
    assert (parse_address("[::1]:80").host, parse_address("[::1]:80").port) == ("::1", 80)
    assert str(parse_address("[::1]:80")) == "[::1]:80"
    assert str(parse_address("localhost:1")) == "localhost:1"
    loopback = ["unix:/s", "127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "localhost:1"]
    beyond = ["0.0.0.0:1", "[::]:1", "192.168.0.1:1", "localhost.example:1", "127.0.0.1.example:1"]
    assert [parse_address(text).is_loopback for text in [*loopback, *beyond]] == [True] * 5 + [False] * 5


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        ":80",
        "a:",
        "a:x",
        "a:65536",
        "a:-1",
        "a:٣",
        "::1:80",
        "unix:x",
        "unix:",
        "unix:/a\0b",
        "unix:/a%00b",
        "http://a:80",
    ],
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(AddressError):
        parse_address(text)


def test_a_port_alone_is_refused_with_the_address_that_was_meant() -> None:
    with pytest.raises(AddressError, match=r"'8642'.* as 127\.0\.0\.1:8642"):
        parse_address("8642")
