"""The lines that `make test-install` runs are those of the pages, and the steps of the image keep its promises."""

import re

import pytest

from tests.install.pages import CLIENTS, ROOT, Client, python_lines

DOCKERFILE = (ROOT / "compose" / "Dockerfile").read_text(encoding="utf-8")
COMPOSE = (ROOT / "compose" / "compose.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_the_page_of_a_client_has_one_line_and_a_program_that_calls_ada(client: Client) -> None:
    assert "\n" not in client.line
    assert "~/kvasir/out/release/" in client.line.replace("$HOME", "~")
    assert "What is my name?" in client.program
    assert "ada" in client.program


def test_each_way_to_install_the_command_line_is_one_line() -> None:
    lines = python_lines()
    assert sorted(lines) == ["pipx", "python3", "uv"]
    assert [line for line in lines.values() if '"$(ls ~/kvasir/out/release/kvasir-*.whl)[all]"' not in line] == []


def instructions(name: str) -> list[str]:
    joined = DOCKERFILE.replace("\\\n", " ")
    return re.findall(rf"^{name} (.*)$", joined, re.MULTILINE)


def test_the_image_runs_as_a_user_and_its_layers_keep_no_caches() -> None:
    assert instructions("USER") == ["kvasir"]
    assert DOCKERFILE.index("\nUSER ") > DOCKERFILE.rindex("\nRUN "), "what is installed is not its own user's"
    for run in instructions("RUN"):
        assert "apt-get install" not in run or ("--no-install-recommends" in run and "rm -rf /var/lib/apt/lists" in run)
        assert "pip install" not in run or ("--no-cache-dir" in run and "--constraint" in run)
    assert instructions("ARG") == ["BASE=debian:trixie-slim"], "a base has a tag"
    for form in ("ENTRYPOINT", "CMD", "HEALTHCHECK"):
        assert all("[" in each for each in instructions(form)), "signals reach kvasir, and no shell"


def test_the_container_has_no_rights_beyond_its_user() -> None:
    for setting in ("cap_drop: [ALL]", "no-new-privileges:true", "read_only: true", "network_mode: host"):
        assert setting in COMPOSE
    assert "ports:" not in COMPOSE, "the gateway listens on loopback alone"
