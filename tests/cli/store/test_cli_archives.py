"""Memories as files: exported, sealed, through a pipe, in the seed's form, and imported."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from kvasir.credentials import write_private_text
from safetensors.numpy import load_file

from tests.cli.running import KVASIR, Cli
from tests.made_models.synthetic import SyntheticAgent


def test_an_archive_carries_a_memory_to_another_name(cli: Cli, ada: SyntheticAgent, tmp_path: Path) -> None:
    file = tmp_path / "ada.tar"
    value = cli.done("agents", "export", "ada", file, "--json").value
    assert value["size_bytes"] == file.stat().st_size
    before = cli.done("agents", "show", "ada", "--json").value["lines"][0]
    made = cli.done("agents", "import", file, "eve", "--json").value
    assert (made["agent_id"], made["token_count"], made["origin"]) == ("eve", 340, "import")
    assert made["manifest"] == before["manifest"]
    taken = cli("agents", "import", file)
    assert taken.code == 4
    assert "--replace" not in cli.done("agents", "import", file, "--replace").out


@pytest.mark.long(5)
def test_a_sealed_export_comes_back_with_its_key_and_is_refused_by_name_without(
    cli: Cli, ada: SyntheticAgent, tmp_path: Path
) -> None:
    words, other, key = (tmp_path / name for name in ("words", "other", "key"))
    for path, text in ((words, "correct horse\n"), (other, "battery\n"), (key, "ab" * 32 + "\n")):
        write_private_text(path, text)
    by_words, by_key = tmp_path / "by-words", tmp_path / "by-key"
    value = cli.done("agents", "export", "ada", by_words, "--passphrase-file", words, "--json").value
    assert (value["is_sealed"], value["size_bytes"]) == (True, by_words.stat().st_size)
    assert "sealed with a master key " in cli.done("agents", "export", "ada", by_key, "--sealed", "--key-file", key).out
    plain = cli.done("agents", "export", "ada", tmp_path / "plain", "--json").value
    secret = (tmp_path / "plain").read_bytes()[20_000:20_064]
    assert plain["is_sealed"] is False
    assert [secret in file.read_bytes() for file in (tmp_path / "plain", by_words, by_key)] == [True, False, False]
    before = cli.done("agents", "show", "ada", "--json").value["lines"][0]
    for name, file, options in (("eve", by_words, ("--passphrase-file", words)), ("ida", by_key, ("--key-file", key))):
        assert cli.done("agents", "import", file, name, *options, "--json").value["manifest"] == before["manifest"]
    told = {
        (by_words,): "is sealed with a passphrase: name the file that has it with --passphrase-file",
        (by_words, "--passphrase-file", other): "this passphrase does not open it",
        (by_key,): "is sealed with the master key ",
    }
    for arguments, said in told.items():
        refused = cli("agents", "import", *arguments, "new", "--json")
        assert (refused.code, refused.value["error"]["reason"]) == (4, "ARCHIVE_SEALED")
        assert said in refused.value["error"]["message"]
    by_key.write_bytes(by_key.read_bytes()[:-1])
    assert "changed or cut" in cli("agents", "import", by_key, "new", "--key-file", key).err
    assert cli("agents", "show", "new").code == 5
    assert cli("agents", "export", "ada", tmp_path / "x", "--sealed").code == 2, "nobody can be asked"
    assert cli("agents", "export", "ada", tmp_path / "x", "--key-file", key, "--passphrase-file", words).code == 2


def test_what_opens_a_sealed_file_is_refused_for_another_file(cli: Cli, ada: SyntheticAgent, tmp_path: Path) -> None:
    words, key, plain, by_words = (tmp_path / name for name in ("words", "key", "plain", "by-words"))
    write_private_text(words, "correct horse\n")
    write_private_text(key, "ab" * 32 + "\n")
    cli.done("agents", "export", "ada", plain)
    cli.done("agents", "export", "ada", by_words, "--passphrase-file", words)
    for file, *options in (
        (plain, "--key-file", key),  # somebody may have put it in the place of the sealed one
        (plain, "--passphrase-file", words),
        (plain, "--passphrase-file", words, "--format", "seed"),
        (by_words, "--key-file", key),
        (by_words, "--passphrase-file", words, "--key-file", key),
    ):
        refused = cli("agents", "import", file, "new", *options, "--json")
        assert (refused.code, refused.value["error"]["reason"]) == (2, "WRONG_USAGE"), (file, options)
    assert cli("agents", "show", "new").code == 5


def test_an_export_keeps_an_older_file_unless_it_may_replace_it(cli: Cli, ada: SyntheticAgent, tmp_path: Path) -> None:
    file = tmp_path / "ada.tar"
    file.write_text("older")
    refused = cli("agents", "export", "ada", file, "--json")
    assert (refused.code, refused.value["error"]["reason"]) == (4, "FILE_EXISTS")
    assert "--force" in cli("agents", "export", "ada", file).err
    assert file.read_text() == "older"
    cli.done("agents", "export", "ada", file, "--force")
    assert file.stat().st_size > 1000
    assert list(tmp_path.iterdir()) == [file], "nothing is left beside it"


@pytest.mark.parametrize("form", ["archive", "seed"])
def test_an_export_replaces_nothing_that_is_no_regular_file(
    form: str, cli: Cli, ada: SyntheticAgent, tmp_path: Path
) -> None:
    link, pipe, target = tmp_path / "link", tmp_path / "pipe", tmp_path / "target"
    target.write_text("theirs")
    link.symlink_to(target)
    os.mkfifo(pipe)
    for path in (link, pipe, tmp_path):
        refused = cli("agents", "export", "ada", path, "--force", "--format", form, "--json")
        assert (refused.code, refused.value["error"]["reason"]) == (4, "FILE_REFUSED")
    assert (link.is_symlink(), pipe.is_fifo(), target.read_text()) == (True, True, "theirs")
    assert sorted(tmp_path.iterdir()) == [link, pipe, target]


@pytest.mark.long(4)
def test_an_archive_goes_through_a_pipe(cli: Cli, ada: SyntheticAgent) -> None:
    command = [KVASIR, "--home", cli.home, "agents"]
    with subprocess.Popen([*command, "export", "ada", "-"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as export:
        made = subprocess.run([*command, "import", "-", "eve", "--json"], stdin=export.stdout, stdout=subprocess.PIPE)
    assert (json.loads(made.stdout).get("agent_id"), export.returncode) == ("eve", 0), made.stdout
    assert not Path("-").exists()
    with subprocess.Popen([*command, "export", "ada", "-"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as export:
        export.stdout.close()  # type: ignore[union-attr]  # nobody reads on
        said = export.stderr.read()  # type: ignore[union-attr]
    assert (export.returncode, said) == (130, b"")


def test_the_seeds_form_carries_a_memory_there_and_back(cli: Cli, ada: SyntheticAgent, tmp_path: Path) -> None:
    file = tmp_path / "ada.safetensors"
    cli.done("agents", "export", "ada", file, "--format", "seed", "--model-name", "tiny")
    assert load_file(file)["layer_0_k_weights"].shape[:2] == (1, 340)
    made = cli.done("agents", "import", file, "eve", "--format", "seed", "--json").value
    assert made["token_count"] == 340
    back = tmp_path / "eve.safetensors"
    cli.done("agents", "export", "eve", back, "--format", "seed", "--model-name", "tiny")
    ours, theirs = load_file(file), load_file(back)
    assert all((ours[name] == theirs[name]).all() for name in ours)


def test_a_file_that_is_no_memory_is_refused_with_the_reason(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "nonsense"
    file.write_bytes(b"nonsense" * 1000)
    assert cli("agents", "import", file).code == 4
    assert cli("agents", "import", file, "--format", "seed").code == 4
    refused = cli("agents", "import", file, "eve", "--format", "seed", "--json")
    assert refused.value["error"]["reason"] == "SEED_FILE_MALFORMED"
