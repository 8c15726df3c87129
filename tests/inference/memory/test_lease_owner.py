"""The name under which an engine holds leases: the same after a restart, and never two living processes'."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from inference_svc.memory.lines.lease_owner import LeaseOwner

HOLD = """
import sys, time
from pathlib import Path
from inference_svc.memory.lines.lease_owner import LeaseOwner
owner = LeaseOwner(Path(sys.argv[1]), lambda: "first")
print(owner.name, flush=True)
time.sleep(60)
"""


def test_a_name_is_kept_over_kill_9_and_not_shared_with_a_living_process(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline().strip() == "first"
        other = LeaseOwner(tmp_path, lambda: "second")
        assert other.name == "second"
        other.close()
        holder.kill()
        holder.wait()
    after = LeaseOwner(tmp_path, lambda: "third")
    assert after.name == "first"
    after.close()


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"x" * 5000, b"a\nb", b"\0"])
def test_a_file_that_holds_no_name_is_written_again(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "lease-owner").write_bytes(content)
    for expected in ("new", "new"):
        owner = LeaseOwner(tmp_path, lambda: "new")
        assert owner.name == expected
        owner.close()
    assert (tmp_path / "lease-owner").read_bytes().startswith(b"new ")


def test_a_copy_of_an_engines_state_gets_a_name_of_its_own_and_an_older_file_keeps_its_name(tmp_path: Path) -> None:
    """Two living engines of one name would take each other's leases, and answer from old memories."""
    there, copy = tmp_path / "there", tmp_path / "copy"
    there.mkdir()
    (there / "lease-owner").write_bytes(b"first\n")
    names = [_name_at(there, "second"), _name_at(there, "third")]
    shutil.copytree(there, copy)
    assert (names, _name_at(copy, "other"), _name_at(copy, "fourth")) == (["first", "first"], "other", "other")
    assert _name_at(there, "fifth") == "first"


def test_a_copy_of_a_whole_disk_has_a_name_of_its_own(tmp_path: Path) -> None:
    """Device and number of the file are the same there; the start of the machine is not."""
    assert [_name_at(tmp_path, "first"), _name_at(tmp_path, "second")] == ["first", "first"]
    file = tmp_path / "lease-owner"
    text = file.read_text()
    boot = Path("/proc/sys/kernel/random/boot_id")
    start = boot.read_text().strip() if boot.exists() else text.split()[-1]
    assert start in text
    file.write_text(text.replace(start, "b1946ac9-2492-4d23-8f26-1f0e5f0c6a11"))
    assert [_name_at(tmp_path, "third"), _name_at(tmp_path, "fourth")] == ["third", "third"]


def _name_at(state_dir: Path, new: str) -> str:
    owner = LeaseOwner(state_dir, lambda: new)
    owner.close()
    return owner.name
