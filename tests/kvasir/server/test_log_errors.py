"""A failure in the logs of the services, in every form: its type and its place, and nothing that it held."""

import json
import subprocess
import sys

import pytest
from kvasir.cli.running.logs import is_important

FAILS = """
import logging, structlog, sys
from kvasir.server.operating.logs import configure_logs
def fail_here(prompt, token):
    try:
        raise ValueError(prompt)
    except ValueError:
        structlog.get_logger("x").exception("it.failed")
        logging.getLogger("y").exception("it.failed too")
for form in ("console", "json"):
    configure_logs(form)
    fail_here("the wudrothi " + "secret", "kv_" + "token")
    print("{end}", flush=True)
    print("{end}", flush=True, file=sys.stderr)
"""
END = "that was one form"


def test_a_logged_failure_tells_its_place_and_no_prompt_or_credential() -> None:
    program = FAILS.format(end=END)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    forms = [out + err for out, err in zip(done.stdout.split(END), done.stderr.split(END), strict=True)][:-1]
    assert not forms[0].lstrip().startswith("{")
    assert [json.loads(line)["event"] for line in forms[1].split("\n") if line] == ["it.failed", "it.failed too"]
    for logged in forms:
        assert "it.failed" in logged
        assert "ValueError" in logged
        assert "fail_here <string>" in logged
        assert "wudrothi" not in logged
        assert "kv_token" not in logged


LOSES = """
import asyncio, gc
{configure}
async def lost(prompt):
    raise ValueError(prompt)
async def main():
    task = asyncio.create_task(lost("the wudrothi " + "secret"))
    await asyncio.sleep(0.01)
    del task
    gc.collect()
    asyncio.get_running_loop().call_soon(lambda prompt: 1 / 0, "the wudrothi " + "prompt")
    await asyncio.sleep(0.01)
asyncio.run(main())
"""
CONFIGURATIONS = {
    "console": "from kvasir.server.operating.logs import configure_logs; configure_logs('console')",
    "json": "from kvasir.server.operating.logs import configure_logs; configure_logs('json')",
    "gateway": "from kvasir_gateway.__main__ import configure_logs; configure_logs()",
}


@pytest.mark.long(2)
@pytest.mark.parametrize("form", CONFIGURATIONS)
def test_what_asyncio_says_of_a_lost_error_tells_its_place_and_nothing_that_it_held(form: str) -> None:
    program = LOSES.format(configure=CONFIGURATIONS[form])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    lost, called = done.stderr.splitlines()
    for line, words in (
        (lost, ("never retrieved", "ValueError", "lost <string>")),
        (called, ("in callback", "ZeroDiv")),
    ):
        assert all(word in line for word in words), line
        assert "wudrothi" not in line
        assert is_important(line)
