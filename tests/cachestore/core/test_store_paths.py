"""Whatever a caller names things, no path outside the store is touched: watched by an audit hook."""

import subprocess
import sys
from pathlib import Path

WATCHED = """
import os, pathlib, sys
from cachestore_svc.facts.records import BlobKind
from kvasir.formats.digest import Digest
from kvasir.errors import InvalidArgument, KvasirError
from tests.cachestore.core.lab import Lab, prefix_of, publish, write
from tests.made_models.synthetic import SMALL, SyntheticAgent

root = pathlib.Path(sys.argv[1])
hostile = ["../../../etc/passwd", "..", ".", "/etc/passwd", "a/../../b", "~", "$HOME", "a\\\\b", "CON", "-rf", "%2e%2e",
           "a\\x00b", "a\\nb", "\\u202egnp", "e\\u0301", "x" * 1_000_000, "\\ud800", "", "A", "a", "\\u212b", "\\u00c5"]
touched = set()
is_watching = False

def watch(event, arguments):
    if is_watching and event.split(".")[0] in ("open", "os", "shutil", "sqlite3", "pathlib"):
        touched.update(str(each).removeprefix("file://") for each in arguments if isinstance(each, (str, os.PathLike)))

contents = [SyntheticAgent(SMALL, number).turn(30) for number in range(len(hostile))]
store = Lab(root).open()
sys.addaudithook(watch)
is_watching = True
accepted = refused = 0
for name, content in zip(hostile, contents):
    for act in (
        lambda: publish(store, name, content, 0),
        lambda: publish(store, "a", content, 0, namespace=name),
        lambda: store.agents.get("default", name),
        lambda: store.agents.fork("default", name, name + "-fork"),
        lambda: store.agents.update("default", name, labels={name: name}),
        lambda: store.agents.page("default", name_prefix=name, page_token=name),
        lambda: prefix_of(store, "default", name, [name]),
        lambda: store.leases.acquire("default", name, "0" * 64, name, 10),
        lambda: store.agents.delete("default", name),
        lambda: store.statistics.of(name),
    ):
        try:
            act()
            accepted += 1
        except KvasirError:
            refused += 1
for bad in ("../" * 21 + "x", "A" * 64, "0" * 63, "0" * 64 + "\\n", "0" * 65, "\\u0660" * 64):
    try:
        Digest(bad, 1)
    except ValueError:
        refused += 1
store.care.collect_garbage()
store.care.check(repair=True)
store.close()
is_watching = False
outside = sorted(path for path in touched if path.startswith("/") and not path.startswith(str(root)))
relative = sorted(path for path in touched if "/" in path and not path.startswith("/"))
print("outside:", outside, "relative:", relative, "inside:", len(touched) > 50, accepted > 30, refused > 60)
"""


def test_no_name_leads_out_of_the_store(tmp_path: Path) -> None:
    root = tmp_path / "data"
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, str(root)], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.stdout == "outside: [] relative: [] inside: True True True\n", done.stderr[-2000:]
