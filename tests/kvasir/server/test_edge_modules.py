"""What both services share at the edge, without a network: statuses, names, credentials, addresses, frames."""

import os
import random
import stat
import subprocess
import sys
import tracemalloc
import unicodedata
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import json_format
from google.rpc import error_details_pb2, status_pb2
from hypothesis import given, settings
from hypothesis import strategies as st
from kvasir import errors
from kvasir.address import AddressError, parse_address
from kvasir.cachestore.v1 import cachestore_pb2 as pb
from kvasir.cachestore.v1 import cachestore_pb2_grpc
from kvasir.clients import StoreClient
from kvasir.credentials import (
    CredentialFileError,
    Credentials,
    Principal,
    hash_token,
    read_credentials,
    read_token,
    write_credentials,
    write_private_text,
)
from kvasir.errors import DataLoss, InvalidArgument, KvasirError
from kvasir.formats.digest import Digest
from kvasir.formats.frames import FRAME_BYTES, FrameAssembler, frames_of
from kvasir.names import check_agent_id, check_namespace, check_request_id
from kvasir.status import ANSWERS, DETAILS_KEY, answer_to, from_rpc_error, from_status, to_status

ROOT = Path(__file__).parents[3]
TYPES = sorted(
    (each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, KvasirError)), key=str
)


class Failed(grpc.RpcError):
    """A failed call as grpc gives it to a client."""

    def __init__(self, code: grpc.StatusCode, message: str, details: bytes | None = None) -> None:
        self._code, self._message, self._details = code, message, details

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._message

    def trailing_metadata(self) -> Any:
        return () if self._details is None else ((DETAILS_KEY, self._details),)


def sent(error: KvasirError) -> KvasirError:
    """What a client has of an error that a service raised."""
    status = to_status(error)
    code = next(code for code in grpc.StatusCode if code.value[0] == status.code)
    return from_rpc_error(Failed(code, status.message, status.SerializeToString()))


def test_a_call_that_is_cut_while_it_sends_may_be_tried_again() -> None:
    """grpc.aio has its own words for that; an error of the service's own, INTERNAL, is none."""
    cut = from_rpc_error(Failed(grpc.StatusCode.INTERNAL, "Internal error from Core"))
    assert (type(cut), cut.reason) == (errors.Unavailable, "STREAM_CUT")
    assert type(sent(errors.Internal("Internal error from Core"))) is errors.Internal


def test_every_error_type_has_its_own_row() -> None:
    assert set(ANSWERS) == set(TYPES) - {KvasirError}
    assert len({answer.code for answer in ANSWERS.values()}) == len(ANSWERS)


# "HTTP Mapping" of google/rpc/code.proto.
HTTP_STATUSES = {
    "CANCELLED": 499,
    "INVALID_ARGUMENT": 400,
    "DEADLINE_EXCEEDED": 504,
    "NOT_FOUND": 404,
    "ALREADY_EXISTS": 409,
    "PERMISSION_DENIED": 403,
    "UNAUTHENTICATED": 401,
    "RESOURCE_EXHAUSTED": 429,
    "FAILED_PRECONDITION": 400,
    "ABORTED": 409,
    "INTERNAL": 500,
    "UNAVAILABLE": 503,
    "DATA_LOSS": 500,
}


def test_http_statuses_are_those_of_google_rpc() -> None:
    assert {answer.code.name: answer.http_status for answer in ANSWERS.values()} == HTTP_STATUSES


@pytest.mark.parametrize("error_type", list(ANSWERS))
def test_an_error_survives_the_body_of_a_gateways_answer(error_type: type[KvasirError]) -> None:
    """As JSON, without any of gRPC's trailers."""
    raised = error_type("Gruß 🐍", reason="SOME_REASON", field="a.b[3]", metadata={"digest": "0" * 64})
    body = json_format.MessageToJson(to_status(raised))
    arrived = from_status(json_format.Parse(body, status_pb2.Status()))
    assert (type(arrived), arrived.message, arrived.reason) == (error_type, "Gruß 🐍", "SOME_REASON")
    assert (arrived.field, arrived.metadata) == ("a.b[3]", {"digest": "0" * 64})
    assert answer_to(arrived) == ANSWERS[error_type]


def test_details_of_another_code_than_the_calls_are_not_read() -> None:
    details = to_status(errors.NotFound("ours")).SerializeToString()
    arrived = from_rpc_error(Failed(grpc.StatusCode.UNAVAILABLE, "a proxy's", details))
    assert (type(arrived), arrived.message) == (errors.Unavailable, "a proxy's")


@pytest.mark.parametrize("error_type", list(ANSWERS))
def test_an_error_arrives_as_the_type_that_was_raised(error_type: type[KvasirError]) -> None:
    raised = error_type("Gruß 🐍", reason="SOME_REASON", field="a.b[3]", metadata={"digest": "0" * 64})
    arrived = sent(raised)
    assert type(arrived) is error_type
    assert (arrived.message, arrived.reason, arrived.field) == ("Gruß 🐍", "SOME_REASON", "a.b[3]")
    assert arrived.metadata == {"digest": "0" * 64}


def test_waiting_is_advised_where_it_helps() -> None:
    assert sent(errors.Unavailable("x", retry_after_s=2.5)).retry_after_s == 2.5
    assert sent(errors.ResourceExhausted("x")).retry_after_s == 1.0
    assert sent(errors.NotFound("x")).retry_after_s is None


def test_details_are_those_of_google_rpc() -> None:
    status = to_status(InvalidArgument("wrong", field="agent_id"))
    info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    assert status.details[0].Unpack(info)
    assert status.details[1].Unpack(bad)
    assert (info.domain, info.reason) == ("kvasir", "INVALID_FIELD")
    assert bad.field_violations[0].field == "agent_id"


@pytest.mark.parametrize("message", ["x" * 100_000, "🐍" * 100_000, "\ud800 lone", "a\0b\n"])
def test_a_status_fits_into_trailers_whatever_its_texts(message: str) -> None:
    status = to_status(
        InvalidArgument(message, field=message, metadata={message: message, **{str(n): message for n in range(50)}})
    )
    assert len(status.SerializeToString()) < 6000
    assert len(status.message.encode()) <= 1024


def test_a_subtype_takes_its_parents_row() -> None:
    class Special(errors.NotFound):
        pass

    assert to_status(Special("x")).code == grpc.StatusCode.NOT_FOUND.value[0]
    assert answer_to(Special("x")) == ANSWERS[errors.NotFound]
    assert answer_to(KvasirError("x")) == ANSWERS[errors.Internal]


@pytest.mark.parametrize("code", list(grpc.StatusCode))
def test_a_status_without_details_is_typed_by_its_code(code: grpc.StatusCode) -> None:
    arrived = from_rpc_error(Failed(code, "said"))
    assert isinstance(arrived, KvasirError)
    assert arrived.message == "said"
    if code in {answer.code for answer in ANSWERS.values()}:
        assert ANSWERS[type(arrived)].code is code


def test_details_that_cannot_be_read_are_as_good_as_none() -> None:
    for details in (b"\xff\xff", b"", status_pb2.Status(code=5).SerializeToString()):
        assert isinstance(from_rpc_error(Failed(grpc.StatusCode.NOT_FOUND, "x", details)), errors.NotFound)


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


# --- frames ---


@settings(max_examples=25)
@given(st.lists(st.integers(0, 2 * FRAME_BYTES), min_size=1, max_size=3), st.integers(0, 1 << 32))
def test_blobs_arrive_as_they_were_over_any_cuts(sizes: list[int], seed: int) -> None:
    source = random.Random(seed)
    blobs = {Digest.of(data): data for data in map(source.randbytes, sizes)}
    assembler = FrameAssembler(list(blobs))
    arrived: dict[Digest, bytes] = {}
    while assembler.remaining:
        offset = assembler.received_bytes
        frames = [
            frame
            for index, digest in enumerate(assembler.remaining)
            for frame in frames_of(digest, blobs[digest], first_offset=offset if index == 0 else 0)
        ]
        assembler.resume()
        for frame in frames[: source.randint(1, len(frames))]:
            if blob := assembler.add(frame):
                arrived[blob[0]] = bytes(blob[1])
    assert arrived == blobs


def bad_frames() -> dict[str, list[pb.BlobFrame]]:
    data = bytes(range(256)) * 5000
    frames = list(frames_of(Digest.of(data), data))
    flipped = bytearray(frames[1].data)
    flipped[0] ^= 1
    return {
        "a bit flipped": [frames[0], pb.BlobFrame(offset=frames[1].offset, data=bytes(flipped))],
        "out of order": [frames[1]],
        "twice": [frames[0], frames[0]],
        "a gap": [frames[0], pb.BlobFrame(offset=frames[1].offset + 1, data=frames[1].data[1:])],
        "named again": [frames[0], pb.BlobFrame(digest=frames[0].digest, offset=frames[1].offset, data=frames[1].data)],
        "another": list(frames_of(Digest.of(b"x"), b"x")),
        "too long": [frames[0], pb.BlobFrame(offset=frames[1].offset, data=frames[1].data + b"x")],
        "too large": [pb.BlobFrame(digest=frames[0].digest, data=data)],
        "empty": [pb.BlobFrame(digest=frames[0].digest)],
        "after the end": [*frames, pb.BlobFrame(data=b"x")],
    }


@pytest.mark.parametrize("name", bad_frames())
def test_frames_that_do_not_fit_are_data_loss(name: str) -> None:
    data = bytes(range(256)) * 5000
    assembler = FrameAssembler([Digest.of(data)])
    *_, last = frames = bad_frames()[name]
    for frame in frames[:-1]:
        assembler.add(frame)
    with pytest.raises(DataLoss):
        assembler.add(last)


def test_what_a_peer_only_says_takes_no_memory() -> None:
    tracemalloc.start()
    try:
        assembler = FrameAssembler([Digest("ab" * 32, 3 << 30)])
        assembler.add(pb.BlobFrame(digest=assembler.remaining[0].to_proto(), data=b"x"))
        assert tracemalloc.get_traced_memory()[1] < FRAME_BYTES
    finally:
        tracemalloc.stop()


# --- the clients ---


class _Boaster(cachestore_pb2_grpc.AgentServiceServicer):
    """A store that says of a manifest that it has 3 GiB."""

    def GetSnapshot(self, request: object, context: object) -> pb.GetSnapshotResponse:  # noqa: N802
        return pb.GetSnapshotResponse(
            snapshot=pb.SnapshotVersion(manifest=Digest("ab" * 32, 3 << 30).to_proto()),
        )


def test_a_manifest_that_nobody_would_read_is_not_fetched() -> None:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    cachestore_pb2_grpc.add_AgentServiceServicer_to_server(_Boaster(), server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with StoreClient.connect(f"127.0.0.1:{port}") as client, pytest.raises(DataLoss) as caught:
            client.get_snapshot("ada")
        assert caught.value.reason == "MANIFEST_REFUSED"
    finally:
        server.stop(0)


def test_the_sdk_needs_neither_mlx_nor_sql_nor_the_service_extras() -> None:
    program = (
        "import sys, kvasir.clients;"
        "import kvasir.formats.archive_reader, kvasir.formats.seed_file, kvasir.credentials;"
        "print([m for m in ('mlx', 'sqlite3', 'numpy', 'pydantic', 'structlog', 'rich', 'typer') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"
