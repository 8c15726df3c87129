"""`python -m tests.inference.formats.call_campaign`: engines with random weights are forced to call tools.

For each format so many times: every reply must be one call of a tool that was offered, with arguments that fit.

A service for each format, one after the other; replies are drawn at temperature 1, beside one another.
"""

import argparse
import json
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jsonschema_rs
from kvasir.clients import InferenceClient
from kvasir.errors import InvalidArgument
from kvasir.inference.v1 import inference_pb2 as pb

from tests.inference.formats.models_that_call import MARKERS, schemas_of, write_model_that_calls
from tests.running.system_fixtures import running_house

_AT_ONCE = 12
_OFFERED = 4  # tools of a turn
_MAX_TOKENS = 1500
_TRIES = 10
_REQUIRED = pb.ToolChoice(kind=pb.TOOL_CHOICE_KIND_REQUIRED, one_call=True)


def called(client: InferenceClient, name: str, number: int) -> str:
    """What is wrong with the number-th reply; empty for a call that fits."""
    schemas = schemas_of(name)
    names = [sorted(schemas)[(number + place) % len(schemas)] for place in range(_OFFERED)]
    tools = [pb.Tool(name=each, parameters_json=json.dumps(schemas[each])) for each in names]
    choice = (
        _REQUIRED if number % 2 else pb.ToolChoice(kind=pb.TOOL_CHOICE_KIND_NAMED, name=names[number // 2 % _OFFERED])
    )
    reply = client.reply(
        messages=[{"role": "user", "content": f"Call number {number}."}],
        tools=tools,
        tool_choice=choice,
        sampling={"temperature": 1.0, "seed": number, "max_tokens": _MAX_TOKENS},
    )
    calls = reply.finished.tool_calls
    if len(calls) != 1 or reply.text.strip():
        return f"{len(calls)} calls and {reply.text[:200]!r}, reason {reply.finished.reason}"
    if calls[0].name not in ([choice.name] if choice.name else names):
        return f"a call of {calls[0].name!r}"
    arguments = json.loads(calls[0].arguments_json)
    if not jsonschema_rs.is_valid(schemas[calls[0].name], arguments):
        return f"{calls[0].name} with {calls[0].arguments_json}"
    return ""


def called_at_last(client: InferenceClient, name: str, number: int) -> str:
    """A format's trial has two seconds, however busy the machine is: it is asked for again."""
    for _ in range(_TRIES):
        try:
            return called(client, name, number)
        except InvalidArgument as error:
            if error.reason != "FORMAT_TOO_COMPLEX":
                raise
    return "its format was refused again and again"


def run(name: str, count: int, root: Path) -> list[str]:
    """What was wrong, by a line each."""
    model = write_model_that_calls(root / "model", name)
    with running_house(root / "house", model) as house, house.client() as client, ThreadPoolExecutor(_AT_ONCE) as pool:
        wrongs = pool.map(lambda number: (number, called_at_last(client, name, number)), range(count))
        return [f"{name} {number}: {wrong}" for number, wrong in wrongs if wrong]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.inference.formats.call_campaign", description=__doc__)
    parser.add_argument("--count", type=int, default=1000, help="replies of each format (default %(default)s)")
    parser.add_argument("--formats", default=",".join(sorted(MARKERS)), help="default: all")
    given = parser.parse_args()
    found: list[str] = []
    for name in given.formats.split(","):
        began_s = time.monotonic()
        with tempfile.TemporaryDirectory() as root:
            wrongs = run(name, given.count, Path(root))
        print(f"{name}: {given.count - len(wrongs)} of {given.count} in {time.monotonic() - began_s:.0f} s", flush=True)
        found += wrongs
    print(*found[:50], sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
