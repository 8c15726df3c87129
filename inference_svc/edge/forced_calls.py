"""Forced tool calls from the wire: which tools the reply must call, as a constraint of the reply."""

import json

from kvasir.errors import InvalidArgument
from kvasir.inference.v1 import inference_pb2 as pb

from inference_svc.formats.constraint import Constraint, ConstraintKind

_NEITHER, _REQUIRED, _NAMED = (
    pb.TOOL_CHOICE_KIND_UNSPECIFIED,
    pb.TOOL_CHOICE_KIND_REQUIRED,
    pb.TOOL_CHOICE_KIND_NAMED,
)


def forced_calls(request: pb.GenerateRequest) -> Constraint | None:
    """None where the model decides. Raises InvalidArgument that names the field."""
    choice = request.tool_choice
    _check(request, choice)
    if choice.kind == _NEITHER:
        return None
    tools = [
        {"place": place, "name": tool.name, "parameters": tool.parameters_json}
        for place, tool in enumerate(request.tools)
        if choice.kind == _REQUIRED or tool.name == choice.name
    ]
    if not tools:
        raise InvalidArgument(
            f"tool_choice.name: expected a tool's, got {choice.name[:128]!r}", field="tool_choice.name"
        )
    one_call = choice.one_call or choice.kind == _NAMED
    return Constraint(ConstraintKind.TOOL_CHOICE, json.dumps({"one_call": one_call, "tools": tools}))


def _check(request: pb.GenerateRequest, choice: pb.ToolChoice) -> None:
    """What would have no effect is refused, not ignored."""
    if choice.kind not in (_NEITHER, _REQUIRED, _NAMED):
        raise InvalidArgument(
            f"tool_choice.kind: expected one of the enum's, got {choice.kind}", field="tool_choice.kind"
        )
    if choice.one_call and choice.kind != _REQUIRED:
        raise InvalidArgument("tool_choice.one_call: only with REQUIRED", field="tool_choice.one_call")
    if choice.name and choice.kind != _NAMED:
        raise InvalidArgument("tool_choice.name: only with NAMED", field="tool_choice.name")
    if choice.kind == _NEITHER:
        return
    if not request.tools:
        raise InvalidArgument("tool_choice: expected tools, got none", field="tool_choice")
    if (other := request.WhichOneof("response_format")) is not None:
        raise InvalidArgument(f"tool_choice: expected no {other} beside it", field="tool_choice")
