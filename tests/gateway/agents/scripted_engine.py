"""The engine, with replies that a script decides: the model of long context is too small to work there.

They are forced by the engine's own grammar of replies. The prompt, its memory, and how calls are read are as ever.
"""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from kvasir.common.v1 import message_pb2
from kvasir.inference.v1 import inference_pb2 as pb

from inference_svc import serving as engine
from inference_svc.edge.inputs import sampling_messages
from inference_svc.engine.engine import Engine
from inference_svc.formats.constraint import Constraint, ConstraintKind
from inference_svc.formats.grammar_trial import GrammarTrial

# By a text of the user's the replies that follow it, in the state directory's parent.
SCRIPT = "decisions.json"
# The summary: long enough to be known again, and no line of what it is a summary of.
OTHERWISE = "What was asked for is done, and the file has the colour that was wanted."
DONE = "That is done."


def decided(request: pb.GenerateRequest, script: Mapping[str, Sequence[Mapping[str, Any]]]) -> Constraint | None:
    """The next reply to the last of the user's texts that the script knows; None where a format is asked for."""
    messages = request.messages.messages or request.append_messages.messages
    if not messages or request.WhichOneof("response_format") is not None or request.tool_choice.kind:
        return None
    offered = {tool.name: place for place, tool in enumerate(request.tools)}
    asks_for_summary = "summary" in "".join(part.text for part in messages[-1].parts).lower()
    reply: Mapping[str, Any] = {"text": OTHERWISE if asks_for_summary else DONE}
    for number in reversed(range(len(messages))):
        said = messages[number]
        known = [
            text
            for text in script
            if said.role == message_pb2.ROLE_USER and text in "".join(part.text for part in said.parts)
        ]
        if known:
            given = sum(message.role == message_pb2.ROLE_ASSISTANT for message in messages[number:])
            rest = script[max(known, key=len)][given:]
            if rest and (rest[0].get("call") in offered or "text" in rest[0]):
                reply = rest[0]
            break
    if "text" in reply:
        return Constraint(ConstraintKind.REGEX, re.escape(reply["text"]))
    tool = {"place": offered[reply["call"]], "name": reply["call"], "parameters": _only(reply["arguments"])}
    return Constraint(ConstraintKind.TOOL_CHOICE, json.dumps({"one_call": True, "tools": [tool]}))


def _only(arguments: Mapping[str, Any]) -> str:
    """A schema that these arguments alone fit."""
    properties = {name: {"const": value} for name, value in arguments.items()}
    return json.dumps({"type": "object", "properties": properties, "required": list(properties)})


def main() -> int:
    """As the service itself."""
    file = Path(sys.argv[sys.argv.index("--state-dir") + 1]).parent / SCRIPT
    asked = sampling_messages.bound_calls

    def constraint(request: pb.GenerateRequest, reply_format: Constraint | None) -> Constraint | None:
        return decided(request, json.loads(file.read_text())) or asked(request, reply_format)

    sampling_messages.bound_calls = constraint
    # A machine that runs other tests besides is slow, and a script's grammars are harmless.
    engine.GrammarTrial = partial(GrammarTrial, timeout_s=120.0)  # type: ignore[misc,assignment]
    return engine.serve_by_arguments(sys.argv[1:], Engine.open)


if __name__ == "__main__":
    sys.exit(main())
