"""No path outside the store is touched: what the service opens, makes, renames or removes is watched by a hook."""

import os
from pathlib import Path

import pytest
from kvasir.cachestore.v1 import cachestore_pb2 as pb
from kvasir.cachestore.v1 import manifest_pb2
from kvasir.errors import KvasirError

from tests.cachestore.service.access.test_who_may_call import (
    BAD_HASHES,
    DIGEST_FIELDS,
    HOSTILE_NAMES,
    NAME_FIELDS,
    call,
)
from tests.cachestore.service.running import StoreHome, publish
from tests.made_models.synthetic import SMALL, SyntheticAgent

# Loaded by the interpreter before anything else; writes each path that is about to be touched.
HOOK = """
import os, sys
_out = os.open(os.environ["TOUCHED"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
_names = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.chmod", "os.truncate",
          "os.listdir", "os.scandir", "shutil.rmtree", "sqlite3.connect", "subprocess.Popen", "os.exec", "os.system",
          "socket.connect")
def _hook(name, arguments):
    if name in _names:
        for each in arguments[: 2 if name == "os.rename" else 1]:
            os.write(_out, (name + "\\t" + repr(each) + "\\n").encode("utf-8", "backslashreplace"))
sys.addaudithook(_hook)
"""

WORDS = ("etc", "passwd", "..", "\\x00", "tmp/x", "~")


@pytest.fixture
def touched(tmp_path: Path) -> Path:
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook" / "sitecustomize.py").write_text(HOOK)
    return tmp_path / "touched"


@pytest.mark.long(3)
def test_hostile_requests_touch_no_path_outside_the_store(home: StoreHome, touched: Path, tmp_path: Path) -> None:
    environment = {"PYTHONPATH": str(tmp_path / "hook"), "TOUCHED": str(touched)}
    running = home.start(env=environment, is_fresh=True)
    turn = SyntheticAgent(SMALL, 1).turn(600)
    names = [*HOSTILE_NAMES.values(), "../../../etc/passwd", "/etc/passwd", "~", "..", "a/../../b"]
    with running.client() as client:
        publish(client, "warm", turn, 0)
        assert "os.rename" in touched.read_text(), "the hook is in place"
        started = touched.stat().st_size
        for name in names:
            for rpc, request in NAME_FIELDS.items():
                call(running.address, rpc, [request(name)])
        for text in BAD_HASHES:
            for rpc, digest_request in DIGEST_FIELDS.items():
                call(running.address, rpc, [digest_request(manifest_pb2.Digest(hash=text, size_bytes=1))])
        for peer in ("unix:/tmp/x.sock", "127.0.0.1:1", "/etc/passwd"):
            call(running.address, "PullAgent", [pb.PullAgentRequest(peer=peer, agent_id="x")])
        for prefix in names:
            call(
                running.address, "ListAgents", [pb.ListAgentsRequest(name_prefix=prefix[:500], page_token=prefix[:500])]
            )
        with pytest.raises(KvasirError):
            client.import_agent("x", [b"../../etc/passwd" * 1000])
        publish(client, "../../etc/passwd", turn, 0)
        client.delete_agent("../../etc/passwd")
        client.collect_garbage()
    with touched.open("rb") as file:
        file.seek(started)
        lines = file.read().decode().splitlines()
    assert lines
    outside = [line for line in lines if not _is_inside(line, home.data_dir)]
    assert outside == []
    assert not [line for line in lines for word in WORDS if word in line.replace(str(tmp_path), "")]


def _is_inside(line: str, data_dir: Path) -> bool:
    name, _, argument = line.partition("\t")
    if name in ("subprocess.Popen", "os.exec", "os.system", "socket.connect"):
        return False
    # A descriptor was opened by name before.
    return argument.isdigit() or os.path.normpath(argument.strip("'").removeprefix("PosixPath('")).startswith(
        str(data_dir)
    )
