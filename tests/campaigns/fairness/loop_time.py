"""How long a large body keeps the gateway's event loop: `python -m tests.campaigns.fairness.loop_time` (Linux).

CPU time of the thread on which the loop runs, of each path and kind of body (8 MiB; 1 MiB of the page), as answered by
real services, without what it spends in as much time while nobody asks; beside it, that of all other threads of the
gateway.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx2 as httpx
from kvasir_gateway.page.conversation.talking import SAY_BYTES

from tests.gateway.conftest import running_front
from tests.gateway.page.html_page import parsed

MOST_MS = 20.0
_BODY_BYTES = (8 << 20) - 2_000
_IDLE_S = 10.0
_LETTER = {"role": "user", "content": "a"}
_CHATS = ("/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/api/chat", "/v1/agents/a/generate")
_TEXTS = {"/v1/completions": "prompt", "/api/generate": "prompt", "/v1/responses": "input"}
_EMBEDDINGS = ("/v1/embeddings", "/api/embed")


def _nested() -> Mapping[str, Any]:
    return {"x": [["a" * 25] * 7] * 31_000}


def bodies() -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """A path, what is large in its body, and the body."""
    for path in _CHATS:
        yield path, "one text", {"messages": [{"role": "user", "content": "a" * _BODY_BYTES}]}
        said = [
            {"role": role, "content": f"{number} " * 130} for number in range(5_000) for role in ("user", "assistant")
        ]
        yield path, "9,999 texts", {"messages": said[:-1]}
        yield path, "letters", {"messages": [_LETTER] * (_BODY_BYTES // 36)}
        yield path, "a field", {"messages": [_LETTER], "metadata": _nested()}
        yield path, "tools", {"messages": [_LETTER], "tools": [_tool()]}
    for path, name in _TEXTS.items():
        yield path, "one text", {name: "a" * _BODY_BYTES}
        yield path, "a field", {name: "a", "metadata": _nested()}
    yield "/v1/completions", "token ids", {"prompt": [77] * 200_000}
    yield "/v1/responses", "9,999 items", {"input": [{"role": "user", "content": "a" * 780}] * 9_999}
    yield "/v1/responses", "a stream of a field", {"input": "a", "stream": True, "metadata": _nested()}
    yield "/v1/responses", "a choice", {"input": "a", "tools": [_tool(10)], "tool_choice": _chosen()}
    for path in _EMBEDDINGS:
        yield path, "one text", {"input": "a" * _BODY_BYTES}
        yield path, "9,999 texts", {"input": ["a" * 780] * 9_999}
        yield path, "token ids", {"input": [[77] * 10] * 9_999}


def sent(client: httpx.Client) -> Iterator[tuple[str, str, bytes]]:
    """A path, what is large in its body, and the bytes of the body; last the page's largest form, of escapes alone."""
    for path, what, asked in bodies():
        limit = {"sampling": {"max_tokens": 1}} if path.startswith("/v1/agents") else {"max_tokens": 1}
        yield path, what, json.dumps({"model": "m", **limit, **asked}).encode()[: 8 << 20]
    page = parsed(client.get("/page/chat").text)
    form = {**page.fields(page.form("say")), "text": "é" * (SAY_BYTES // 6 - 200)}
    yield "/page/say", "a form of escapes", urlencode(form).encode()


def _tool(size: int = 10_000) -> Mapping[str, Any]:
    """A tool in the words of each API."""
    schema = {"type": "object", "properties": {"a": {"enum": [["a" * 25] * 7] * size}}}
    function = {"name": "f", "parameters": schema}
    return {"type": "function", **function, "input_schema": schema, "function": function}


def _chosen() -> Mapping[str, Any]:
    return {"type": "function", "name": "f", **_nested()}


def on_loop_s(pid: int) -> float:
    """CPU seconds of a process's first thread."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


def beside_loop_s(pid: int) -> float:
    """CPU seconds of its other threads."""
    times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return sum(map(int, times)) / os.sysconf("SC_CLK_TCK") - on_loop_s(pid)


def idle_share(pid: int) -> float:
    """What part of its time that thread computes while nobody asks."""
    before = on_loop_s(pid)
    time.sleep(_IDLE_S)
    return (on_loop_s(pid) - before) / _IDLE_S


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.fairness.loop_time", description=__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="rows whose path and kind have this text")
    parser.add_argument("--times", type=int, default=3, help="how often each body is sent")
    arguments = parser.parse_args()
    slow = 0
    with tempfile.TemporaryDirectory(prefix="loop") as directory, running_front(Path(directory)) as front:
        form = {"content-type": "application/x-www-form-urlencoded", "origin": front.gateway.url}
        with httpx.Client(base_url=front.gateway.url, headers={**front.bearer(), **form}, timeout=600) as client:
            idle = idle_share(front.gateway.pid)
            for path, what, data in sent(client):
                if arguments.only not in f"{path} {what}":
                    continue
                on_loop_ms, beside_ms, status = [], [], 0
                for _ in range(arguments.times):
                    before, began = _cpu_s(front.gateway.pid), time.monotonic()
                    status = client.post(path, content=data).status_code
                    passed_s = time.monotonic() - began
                    spent = [1000 * (now - then) for now, then in zip(_cpu_s(front.gateway.pid), before, strict=True)]
                    on_loop_ms.append(spent[0] - 1000 * idle * passed_s)
                    beside_ms.append(spent[1])
                median, beside = statistics.median(on_loop_ms), statistics.median(beside_ms)
                slow += median > MOST_MS
                row = f"{path:28s} {what:20s} {len(data) >> 10:5d} KiB {status}"
                print(f"{row} {median:7.1f} ms, beside it {beside:5.0f}", flush=True)
    print(f"idle, it computes {1000 * idle:.1f} ms a second; {slow} take more than {MOST_MS:.0f} ms")
    return 1 if slow else 0


def _cpu_s(pid: int) -> tuple[float, float]:
    return on_loop_s(pid), beside_loop_s(pid)


if __name__ == "__main__":
    sys.exit(main())
