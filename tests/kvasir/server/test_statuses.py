"""Errors over the wire: each arrives as the type that was raised, with its details."""

from typing import Any

import grpc
import pytest
from google.protobuf import json_format
from google.rpc import error_details_pb2, status_pb2
from kvasir import errors
from kvasir.clients import InferenceClient
from kvasir.errors import InvalidArgument, KvasirError
from kvasir.status import ANSWERS, DETAILS_KEY, answer_to, from_rpc_error, from_status, to_status

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


def test_a_call_beyond_those_of_a_connection_may_be_tried_again_in_a_moment() -> None:
    told = "Stream removed (RST_STREAM (Received RST_STREAM with error code 7))"  # of 1,000 turns at once
    refused = from_rpc_error(Failed(grpc.StatusCode.UNAVAILABLE, told))
    assert (type(refused), refused.reason, refused.retry_after_s) == (errors.Unavailable, "UNAVAILABLE", 1.0)
    assert "takes no more calls" in refused.message
    assert from_rpc_error(Failed(grpc.StatusCode.UNAVAILABLE, told.replace("7", "8"))).retry_after_s is None


@pytest.mark.parametrize(
    ("at", "why"),
    [("unix:/nobody/here.sock", "No such file or directory"), ("ipv4:127.0.0.1:1", "Connection refused")],
)
def test_an_address_where_nobody_listens_is_named_with_the_systems_reason(at: str, why: str) -> None:
    """By a real connection: the words are the library's, and newer ones may be others."""
    with InferenceClient.connect(at.removeprefix("ipv4:"), timeout_s=30) as client:
        with pytest.raises(errors.Unavailable) as refused:
            client.get_stats()
    assert refused.value.message == f"cannot connect to {at}: {why}"


def test_an_error_has_no_wait_below_nothing() -> None:
    """By whoever stands before a service: a caller that sleeps for so long would fail by that."""
    status = to_status(errors.Unavailable("later", retry_after_s=-5.0))
    assert from_status(status).retry_after_s == 0.0


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
