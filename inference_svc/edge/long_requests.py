"""Checks long requests beside the event loop: one of 10,000 messages takes a tenth of a second."""

from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from typing import TypeAlias, TypeVar

from kvasir.call_context import call_bytes
from kvasir.credentials import Principal
from kvasir.inference.v1 import inference_pb2 as pb

from inference_svc.model.prompting import Prompting
from inference_svc.turns.admission import Admission

Request: TypeAlias = pb.GenerateRequest | pb.CountTokensRequest | pb.WarmRequest
# More is long. So few are checked in some milliseconds, and a thread would delay them by as much.
_FEW_PARTS, _FEW_BYTES = 500, 1 << 20
_Checked = TypeVar("_Checked")


async def checked(
    request: Request,
    caller: Principal,
    check: Callable[[], _Checked],
    admission: Admission,
    prompting: Prompting | None,
) -> _Checked:
    """The result of `check`. A long request counts as a prompt meanwhile, and is checked by the thread that renders
    long conversations: two busy threads would delay each step of the event loop twice. Raises what `check` raises,
    ResourceExhausted, and Unavailable when the model goes."""
    size_bytes = call_bytes() or request.ByteSize()
    if prompting is None or (size_bytes <= _FEW_BYTES and _has_few_parts(request)):
        return check()
    with admission.turn(caller.namespace, caller.name, size_bytes):
        return await prompting.run(caller.namespace, partial(copy_context().run, check), is_large_render=True)


def _has_few_parts(request: Request) -> bool:
    """Of its messages, each of which is one at least; tool calls are parts, too."""
    kind = request.WhichOneof("input")
    messages = getattr(request, kind).messages if kind in ("messages", "append_messages") else ()
    if len(messages) > _FEW_PARTS:
        return False
    return sum(max(1, len(each.parts) + len(each.tool_calls)) for each in messages) <= _FEW_PARTS
