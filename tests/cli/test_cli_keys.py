"""`kvasir keys`: a namespace is sealed, its master key replaced, its key destroyed; and what is refused says why."""

import json
import shutil
from pathlib import Path

import pytest
from kvasir.cli.running.home import Home
from kvasir.cli.running.plan import plan_of
from kvasir.cli.settings.asked import Asked

from tests.cli.running import Cli
from tests.running import in_memory


@pytest.mark.long(2)
def test_a_namespace_is_sealed_its_master_key_replaced_and_its_key_destroyed(tmp_path: Path) -> None:
    cli = Cli(tmp_path / "home")
    assert "no namespace is sealed" in cli.done("keys", "ls").out
    [made] = cli.done("keys", "new", "work", "--json").value["namespaces"]
    assert (made["namespace"], len(made["master_ids"]), made["files"]) == ("work", 1, 0)
    assert (cli.home / "seal.key").stat().st_mode & 0o777 == 0o600
    assert "is in use, or sealed already" in cli("keys", "new", "work").err
    [rotated] = cli.done("keys", "rotate", "--new-key-file", tmp_path / "new.key", "--json").value["namespaces"]
    assert rotated["master_ids"] != made["master_ids"]
    refused = cli("keys", "rotate", "--new-key-file", tmp_path / "newer.key")
    assert refused.code != 0
    assert f"'work' is sealed: it needs the master key {rotated['master_ids'][0]}" in refused.err
    assert "rows remain, sealed for ever" in cli.done("keys", "erase", "work", "--yes").out
    assert "its key was destroyed" in cli.done("keys", "ls").out
    assert (cli.home / "sealed-namespaces").read_text() == "work\n"
    shutil.rmtree(cli.home / "store")
    assert "'work' is sealed: its key record" in cli("keys", "ls").err
    told = [json.loads(line) for line in (cli.home / "audit" / "store.jsonl").read_text().splitlines()]
    assert [(line["what"], line["namespace"], line["outcome"], line["reason"]) for line in told] == [
        ("keys/new", "work", "allowed", ""),
        ("keys/new", "work", "refused", "NAMESPACE_IN_USE"),
        ("keys/rotate", "", "allowed", ""),
        ("keys/rotate", "", "refused", "NAMESPACE_SEALED"),
        ("keys/erase", "work", "allowed", ""),
    ]


def test_the_store_of_a_home_is_told_which_namespaces_are_sealed(tmp_path: Path) -> None:
    home = Home(tmp_path)
    told = plan_of(Asked(home)).store.argv()
    assert told[told.index("--sealed-file") + 1] == str(tmp_path / "sealed-namespaces")
    assert home.sealed_options(tmp_path / "store") == home.sealed_options()
    assert home.sealed_options(tmp_path / "another") == (), "its list is its own"


@pytest.mark.long(3)
def test_status_names_a_sealed_namespace_whose_master_key_the_store_lacks() -> None:
    home = in_memory.home()
    cli, key = Cli(home), home / "elsewhere.key"
    try:
        for namespace in ("work", "gone"):
            cli.done("keys", "new", namespace, "--key-file", key)
            cli.done("tokens", "new", f"of-{namespace}", "--namespace", namespace)
        cli.done("keys", "erase", "gone", "--yes")
        cli.done("store", "serve", "-d")
        told = cli("status", "--json")
        [problem] = told.value["services"][0]["problems"]
        assert (told.code, "'work' is sealed: it needs the master key" in problem) == (1, True)
        assert problem.endswith("(NAMESPACE_SEALED)")
        cli.done("down")
        key.rename(home / "seal.key")
        cli.done("store", "serve", "-d")
        assert cli.done("status", "--json").value["services"][0]["problems"] == []
    finally:
        cli("down")
        shutil.rmtree(home)


def test_a_key_beside_the_data_is_reported_to_open_every_backup(tmp_path: Path) -> None:
    cli = Cli(tmp_path / "home")
    assert "opens everything" in cli.done("keys", "new", "work").out
    assert "The audit" in " ".join(cli.done("keys", "new", "--help").out.split())
    assert "opens everything" not in cli.done("keys", "new", "far", "--key-file", tmp_path / "far.key").out


@pytest.mark.parametrize("name", ["a/b", "A B", "", "ä", "-x", "e" * 65])
def test_no_namespace_is_sealed_that_no_token_could_have(tmp_path: Path, name: str) -> None:
    refused = Cli(tmp_path)("keys", "new", "--json", "--", name)
    error = refused.value["error"]
    assert (refused.code, error["reason"], error["field"]) == (4, "INVALID_FIELD", "NAMESPACE")
    assert not list(tmp_path.iterdir())


def test_credentials_of_another_store_may_name_any_namespace(tmp_path: Path) -> None:
    [made] = Cli(tmp_path).done("keys", "new", "a/b", "--data-dir", tmp_path / "far", "--json").value["namespaces"]
    assert made["namespace"] == "a/b"
