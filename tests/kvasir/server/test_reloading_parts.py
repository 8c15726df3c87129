"""A reload whose part fails in a way that is no wrong file: it is told, and the other parts are read."""

import asyncio
import logging
from pathlib import Path

import pytest
from kvasir.cli.callers.audit import lines_of
from kvasir.errors import ResourceExhausted
from kvasir.server.operating.audit import Audit, AuditFile
from kvasir.server.reloading import Reloading


@pytest.mark.parametrize("error", [ResourceExhausted("a secret", reason="DISK_FULL"), KeyError("a secret")])
def test_a_part_that_fails_is_told_and_keeps_no_other_from_being_read(
    error: Exception, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def fails() -> int:
        raise error

    async def reads() -> int:
        return 3

    audit = Audit("store", AuditFile(tmp_path / "audit.jsonl"))
    reloading = Reloading(audit)
    reloading.add("peers", fails)
    reloading.add("tokens", reads)
    with caplog.at_level(logging.ERROR):
        asyncio.run(reloading.reload())
    assert reloading.problems == ("peers",)
    audit.close()
    [line] = lines_of(tmp_path / "audit.jsonl")
    told = (line["outcome"], line["reason"], line["parts"], line["ended_calls"])
    assert told == ("refused", "UNUSABLE_PEERS", "tokens", "3")
    assert type(error).__name__ in caplog.text
    assert "secret" not in caplog.text
