"""Carries out one call over a channel, byte for byte, and says what is wrong with its answer."""

import contextlib
import re
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from kvasir.status import DETAILS_KEY, DOMAIN

from tests.campaigns.fuzz.calls import Call, Requests
from tests.campaigns.fuzz.campaign import Outcome, Send

_REASON = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)*")
_WAITING_HELPS = {"UNAVAILABLE", "RESOURCE_EXHAUSTED"}
# Of these a caller may be told by its own gRPC.
_CALLERS_OWN = {"DEADLINE_EXCEEDED", "CANCELLED"}
_TOO_LARGE = re.compile(r"message larger than max|Received message larger", re.IGNORECASE)
# Turns take as long as they take, and what takes a memory back waits for its lease to end.
_MAY_LAST = {"Generate", "Warm", "DeleteAgent", "RollbackAgent", "ForkAgent", "ImportAgent", "PullAgent"}
_MAY_LAST |= {"MoveAgent", "OfferAgent", "FenceAgent"}
_MOST_BESIDE = 3
_BEGINS_S = 0.05  # for a call beside which others are made
_OPTIONS = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1), ("grpc.enable_retries", 0))


@dataclass(frozen=True)
class Answer:
    """How a call ended."""

    status: str
    message: str
    details: bytes | None
    responses: int = 0

    @property
    def error_info(self) -> error_details_pb2.ErrorInfo | None:
        """Its ErrorInfo, if it has one that can be read."""
        return next((each for each in self.unpacked() if isinstance(each, error_details_pb2.ErrorInfo)), None)

    def unpacked(self) -> list[error_details_pb2.ErrorInfo | error_details_pb2.RetryInfo]:
        """Its details of the kinds that are looked at."""
        try:
            status = status_pb2.Status.FromString(self.details or b"")
        except DecodeError:
            return []
        kinds = (error_details_pb2.ErrorInfo, error_details_pb2.RetryInfo)
        targets = [(detail, kind()) for detail in status.details for kind in kinds]
        return [target for detail, target in targets if detail.Unpack(target)]


@contextlib.contextmanager
def sending(requests: Requests, addresses: Mapping[str, str], seed: int) -> Iterator[Send]:
    """Sends requests over channels of its own to each service."""
    with contextlib.ExitStack() as stack:
        channels = {name: stack.enter_context(open_channel(address)) for name, address in addresses.items()}

        beside = stack.enter_context(ThreadPoolExecutor(_MOST_BESIDE))

        def asked(call: Call) -> Outcome:
            answer = ask(channels[call.rpc.path.split("/")[1]], call)
            problem = what_is_wrong(call, answer) or _late(call, answer)
            did_it = answer.status == "OK" or answer.responses > 0
            return Outcome(call.rpc.name, answer.status, did_it, problem, str(call))

        def send(number: int) -> Iterator[Outcome]:
            running = []
            for call in requests.of(seed, number):
                if call.is_beside:
                    running.append(beside.submit(asked, call))
                    time.sleep(_BEGINS_S)
                else:
                    yield asked(call)
            yield from (each.result() for each in running)

        yield send


def open_channel(address: str) -> grpc.Channel:
    """A channel that nobody shares."""
    return grpc.insecure_channel(address, (*_OPTIONS, ("grpc.use_local_subchannel_pool", 1)))


def ask(channel: grpc.Channel, call: Call) -> Answer:
    """Make the call as its caller would, to its end."""
    metadata = (("authorization", call.authorization),) if call.authorization is not None else ()
    over = threading.Event()
    rpc = channel.stream_stream(call.rpc.path)(_sent(call, over), timeout=call.timeout_s, metadata=metadata)
    leaving = threading.Timer(call.cancel_after_s or 0.0, rpc.cancel)
    if call.cancel_after_s is not None:
        leaving.start()
    taken = 0
    try:
        while taken != call.takes and next(rpc, None) is not None:
            taken += 1
    except grpc.RpcError:
        pass  # the status is asked for below
    finally:
        over.set()
        leaving.cancel()
    if taken == call.takes:
        rpc.cancel()
    details = next((value for key, value in rpc.trailing_metadata() or () if key == DETAILS_KEY), None)
    return Answer(rpc.code().name, rpc.details() or "", details, taken)


def _sent(call: Call, over: threading.Event) -> Iterator[bytes]:
    yield from call.messages
    if call.is_left_open:
        over.wait()


def _late(call: Call, answer: Answer) -> str | None:
    is_late = answer.status == "DEADLINE_EXCEEDED" and call.timeout_s >= 5 and call.rpc.name not in _MAY_LAST
    return f"no answer within {call.timeout_s} s" if is_late else None


def what_is_wrong(call: Call, answer: Answer) -> str | None:
    """What the contract does not allow in this answer; None if all is well."""
    said = f"{answer.status}: {answer.message}"
    was_left = call.cancel_after_s is not None or call.takes is not None
    if answer.status not in call.rpc.statuses:
        return f"not a status of this RPC: {said}"
    if answer.status == "OK" or (answer.status in _CALLERS_OWN and answer.details is None):
        is_unasked = answer.status == "CANCELLED" and not was_left
        return f"nobody cancelled it: {said}" if is_unasked else None
    if answer.status == "RESOURCE_EXHAUSTED" and answer.details is None and _TOO_LARGE.search(answer.message):
        return None  # refused unread, as the contract says
    info = answer.error_info
    if info is None:
        return f"no ErrorInfo: {said}"
    if info.domain != DOMAIN or not _REASON.fullmatch(info.reason):
        return f"domain {info.domain!r}, reason {info.reason!r}: {said}"
    has_retry = any(isinstance(each, error_details_pb2.RetryInfo) for each in answer.unpacked())
    return f"no RetryInfo: {said}" if answer.status in _WAITING_HELPS and not has_retry else None
