"""A failure in the logs of the services, in every form: its type and its place, and nothing that it held."""

import json
import subprocess
import sys

FAILS = """
import logging, structlog, sys
from kvasir.server.logs import configure_logs
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
