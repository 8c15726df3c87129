"""A failure in the logs of either service, in every form: its type and its place, and nothing that it held."""

import subprocess
import sys

import pytest

ENGINE = "import inference_svc.__main__ as m; from inference_svc.config import EngineSettings as S; "
SET_UP = {
    "engine": ENGINE + "set_up = lambda form: m._set_up_logging(S(listen='unix:/s', log_format=form))",
    "store": "from cachestore_svc.logs import configure_logs as set_up",
}
FAILS = """
import logging, structlog, sys
def fail_here(prompt, token):
    try:
        raise ValueError(prompt)
    except ValueError:
        structlog.get_logger("x").exception("it.failed")
        {library}
for form in ("console", "json"):
    set_up(form)
    fail_here("the wudrothi " + "secret", "kv_" + "token")
    print("{end}", flush=True)
    print("{end}", flush=True, file=sys.stderr)
"""
END = "that was one form"


@pytest.mark.parametrize("service", SET_UP)
def test_a_logged_failure_tells_its_place_and_no_prompt_or_credential(service: str) -> None:
    library = "logging.getLogger('y').exception('it.failed too')" if service == "store" else ""
    program = SET_UP[service] + FAILS.format(library=library, end=END)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    forms = [out + err for out, err in zip(done.stdout.split(END), done.stderr.split(END), strict=True)][:-1]
    assert [logged.lstrip().startswith("{") for logged in forms] == [False, True]
    for logged in forms:
        assert "it.failed" in logged
        assert "ValueError" in logged
        assert "fail_here <string>" in logged
        assert "wudrothi" not in logged
        assert "kv_token" not in logged
