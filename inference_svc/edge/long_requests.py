"""Checks long requests beside the event loop: one of 10,000 messages takes a tenth of a second."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeAlias, TypeVar

from kvasir.credentials import Principal
from kvasir.inference.v1 import inference_pb2 as pb
from kvasir.server.shared_room import SharedRoom

from inference_svc.turns.admission import Admission

Request: TypeAlias = pb.GenerateRequest | pb.CountTokensRequest | pb.WarmRequest
# More is long. So few are checked in some milliseconds, and a thread would delay them by as much.
_FEW_PARTS, _FEW_BYTES = 500, 1 << 20
_Checked = TypeVar("_Checked")


class LongRequests:
    """Runs the checks of one service's requests, long ones on a thread, namespaces in turn."""

    def __init__(self, admission: Admission) -> None:
        """`admission`: where long requests count as prompts until they are checked."""
        self._admission = admission
        self._checking = SharedRoom(1)
        # Of its own: a call that is cancelled leaves its check behind, and the next one waits for that here.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checks")

    async def checked(self, request: Request, caller: Principal, check: Callable[[], _Checked]) -> _Checked:
        """The result of `check`. Raises what it raises, and ResourceExhausted."""
        size_bytes = request.ByteSize()
        if size_bytes <= _FEW_BYTES and _has_few_parts(request):
            return check()
        with self._admission.turn(caller.namespace, caller.name, size_bytes):
            async with self._checking.held_for(caller.namespace, 1):
                return await asyncio.get_running_loop().run_in_executor(self._thread, copy_context().run, check)


def _has_few_parts(request: Request) -> bool:
    """Of its messages, each of which is one at least; tool calls are parts, too."""
    kind = request.WhichOneof("input")
    messages = getattr(request, kind).messages if kind in ("messages", "append_messages") else ()
    if len(messages) > _FEW_PARTS:
        return False
    return sum(max(1, len(each.parts) + len(each.tool_calls)) for each in messages) <= _FEW_PARTS
