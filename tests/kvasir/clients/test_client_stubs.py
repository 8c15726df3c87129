"""What clients of other languages are built from is today's proto/, compared as files: no toolchain is needed."""

import hashlib
from pathlib import Path

import pytest

from tests.conformance.programs import LANGUAGES, Language

ROOT = Path(__file__).parents[3]
CLIENTS = ROOT / "clients"
OTHER_LANGUAGES = ("go", "typescript", "rust", "java", "swift")


def contents(folder: Path) -> dict[str, bytes]:
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_the_go_stubs_are_made_of_todays_contract() -> None:
    lines = (CLIENTS / "go/gen/proto.sha256").read_text().splitlines()
    made_of = {name: digest for digest, name in (line.split() for line in lines)}
    files = sorted((ROOT / "proto" / "kvasir").rglob("*.proto"))
    today = {str(file.relative_to(ROOT / "proto")): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    assert made_of == today, "run 'make generate'"
    stubs = {file.stem.removesuffix(".pb") for file in (CLIENTS / "go/gen").rglob("*.pb.go")}
    assert {file.stem for file in files} <= stubs


@pytest.mark.parametrize("copy", ["typescript/proto/kvasir", "rust/proto/kvasir", "java/proto/kvasir"])
def test_a_clients_copy_of_the_contract_is_todays(copy: str) -> None:
    assert contents(CLIENTS / copy) == contents(ROOT / "proto" / "kvasir"), "run 'make generate'"


@pytest.mark.parametrize("client", ["go", "typescript", "rust", "java"])
def test_a_clients_copy_of_the_golden_cases_is_todays(client: str) -> None:
    assert contents(CLIENTS / client / "proto/vectors") == contents(ROOT / "proto" / "vectors"), "run 'make generate'"


@pytest.mark.parametrize("client", OTHER_LANGUAGES)
def test_a_client_is_built_from_its_own_folder(client: str) -> None:
    folder = CLIENTS / client
    outside = [str(path) for path in folder.rglob("*") if path.is_symlink() and "node_modules" not in path.parts]
    assert outside == [], "a copied folder loses what it links to"
    builds = [
        path
        for name in (
            "package.json",
            "buf.gen.yaml",
            "tsconfig.json",
            "Cargo.toml",
            "build.rs",
            "pom.xml",
            "go.mod",
            "Package.swift",
        )
        if (path := folder / name).exists()
    ]
    assert builds
    assert [path.name for path in builds if "../" in path.read_text(encoding="utf-8")] == []


@pytest.mark.parametrize("language", [each for each in LANGUAGES if each.example_file], ids=lambda each: each.name)
def test_the_page_of_a_client_shows_its_first_example_as_it_is(language: Language) -> None:
    assert language.first_example() in (language.folder / "README.md").read_text(encoding="utf-8")
