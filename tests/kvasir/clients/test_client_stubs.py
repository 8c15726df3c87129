"""The Go stubs were made of today's proto/: compared by hashes, since Go itself is not needed to run the tests."""

import hashlib
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_go_stubs_are_made_of_todays_contract() -> None:
    lines = (ROOT / "clients/go/gen/proto.sha256").read_text().splitlines()
    made_of = {name: digest for digest, name in (line.split() for line in lines)}
    files = sorted((ROOT / "proto" / "kvasir").rglob("*.proto"))
    today = {str(file.relative_to(ROOT / "proto")): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    assert made_of == today, "run 'make generate'"
    stubs = {file.stem.removesuffix(".pb") for file in (ROOT / "clients/go/gen").rglob("*.pb.go")}
    assert {file.stem for file in files} <= stubs
