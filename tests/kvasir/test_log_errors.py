"""A failure in the logs of either service, in every form: its type and its place, and nothing that it held."""

import subprocess
import sys

import pytest

ENGINE = "import inference_svc.__main__ as m; from inference_svc.config import EngineSettings as S; "
SET_UP = {
    "engine": ENGINE + "m._set_up_logging(S(listen='unix:/s', log_format={form!r}))",
    "store": "from cachestore_svc.logs import configure_logs; configure_logs({form!r})",
}
FAILS = """
import logging, structlog
def fail_here(prompt, token):
    try:
        raise ValueError(prompt)
    except ValueError:
        structlog.get_logger("x").exception("it.failed")
        {library}
fail_here("the wudrothi " + "secret", "kv_" + "token")
"""


@pytest.mark.parametrize("form", ["console", "json"])
@pytest.mark.parametrize("service", SET_UP)
def test_a_logged_failure_tells_its_place_and_no_prompt_or_credential(service: str, form: str) -> None:
    library = "logging.getLogger('y').exception('it.failed too')" if service == "store" else ""
    program = SET_UP[service].format(form=form) + FAILS.format(library=library)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    logged = done.stdout + done.stderr
    assert "it.failed" in logged
    assert "ValueError" in logged
    assert "fail_here <string>" in logged
    assert "wudrothi" not in logged
    assert "kv_token" not in logged
