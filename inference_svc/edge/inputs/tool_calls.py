"""Which calls of tools a reply must or may have, from the wire: a constraint of the reply."""

import json

from kvasir.errors import InvalidArgument
from kvasir.inference.v1 import inference_pb2 as pb

from inference_svc.formats.constraint import Constraint, ConstraintKind

_NEITHER, _REQUIRED, _NAMED, _NONE = (
    *(pb.TOOL_CHOICE_KIND_UNSPECIFIED, pb.TOOL_CHOICE_KIND_REQUIRED),
    *(pb.TOOL_CHOICE_KIND_NAMED, pb.TOOL_CHOICE_KIND_NONE),
)


def bound_calls(request: pb.GenerateRequest, reply_format: Constraint | None) -> Constraint | None:
    """What calls and format bind together; None where nothing is bound. Raises InvalidArgument."""
    choice = request.tool_choice
    _check(request, choice)
    if not request.tools:
        return reply_format
    if choice.kind == _NONE:
        return reply_format or _constraint(ConstraintKind.CALLS_IN_TEXT, request)
    if choice.kind != _NEITHER:
        return _constraint(ConstraintKind.TOOL_CHOICE, request)
    if reply_format is not None:
        return _constraint(ConstraintKind.CALLS_OR_FORMAT, request, reply_format)
    if choice.one_call or choice.names or any(tool.strict for tool in request.tools):
        return _constraint(ConstraintKind.CALLS_IN_TEXT, request)
    return None


def _constraint(
    kind: ConstraintKind, request: pb.GenerateRequest, reply_format: Constraint | None = None
) -> Constraint:
    choice = request.tool_choice
    names = [choice.name] if choice.kind == _NAMED else choice.names
    tools = [
        {"place": place, "name": tool.name, "parameters": tool.parameters_json}
        | ({"strict": tool.strict} if kind is ConstraintKind.CALLS_IN_TEXT else {})
        for place, tool in enumerate(request.tools)
        if choice.kind != _NONE and (not names or tool.name in names)
    ]
    asked: dict[str, object] = {"one_call": choice.one_call or choice.kind == _NAMED, "tools": tools}
    if reply_format is not None:
        asked["format"] = {"kind": reply_format.kind.value, "text": reply_format.text}
    return Constraint(kind, json.dumps(asked))


def _check(request: pb.GenerateRequest, choice: pb.ToolChoice) -> None:
    """What would have no effect is refused, not ignored."""
    if choice.kind not in (_NEITHER, _REQUIRED, _NAMED, _NONE):
        raise InvalidArgument.of("tool_choice.kind", f"expected one of the enum's, got {choice.kind}")
    if choice.kind in (_NAMED, _NONE) and (choice.one_call or choice.names):
        field = "tool_choice.one_call" if choice.one_call else "tool_choice.names"
        raise InvalidArgument.of(field, "not with NAMED or NONE")
    if choice.name and choice.kind != _NAMED:
        raise InvalidArgument.of("tool_choice.name", "only with NAMED")
    if choice.ListFields() and not request.tools:
        raise InvalidArgument.of("tool_choice", "expected tools, got none")
    known = {tool.name for tool in request.tools}
    if choice.kind == _NAMED and choice.name not in known:
        raise InvalidArgument.of("tool_choice.name", f"expected the name of a tool, got {choice.name[:128]!r}")
    for place, name in enumerate(choice.names):
        if name not in known:
            raise InvalidArgument.of(f"tool_choice.names[{place}]", f"expected the name of a tool, got {name[:128]!r}")
    if choice.kind in (_REQUIRED, _NAMED) and (other := request.WhichOneof("response_format")) is not None:
        raise InvalidArgument.of("tool_choice", f"expected no {other} beside it")
