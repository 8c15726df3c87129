"""Every command and snippet of the site is run by a test, or stands here with the reason why none runs it."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from tools.site import includes

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_BARE = re.compile(r"^```\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_TYPED = re.compile(r"^(?:\$ )?(?:kvasir|make|pip|python3?|uv|git|curl|docker|npm|go|cargo|mvn|swift) ", re.MULTILINE)
_OTHER_LANGUAGE = "`make test-clients` builds and runs it where the toolchain is"
_INSTALLED = "`make test-install` types it in an empty folder, with a home of its own"
_AGENT_CLIENT = "`make test-agents` takes these very lines; it installs the client from npm or PyPI"
# By file, and by the first words of a block: the tests that run it, or a reason.
SNIPPETS: Mapping[str, Mapping[str, tuple[str, ...] | str]] = {
    "README.md": {
        "make demo": "CI runs it, as a step of its own",
        "$ kvasir chat ada": ("test_the_five_minutes_go_as_on_the_page",),
        "make check": "they run the tests themselves",
    },
    "docs/pages/five-minutes.md": {
        "make install": "each run of the tests begins with it",
        "kvasir chat ada": ("test_the_five_minutes_go_as_on_the_page",),
        "kill -9": ("test_the_five_minutes_go_as_on_the_page",),
        "kvasir status": ("test_the_five_minutes_go_as_on_the_page",),
    },
    "docs/pages/two-engines.md": {
        "openssl req": ("test_an_agent_goes_on_at_the_other_engine_as_one_that_never_left_also_after_a_kill",),
        "kvasir up -d --store": ("test_an_agent_goes_on_at_the_other_engine_as_one_that_never_left_also_after_a_kill",),
        "kvasir fleet status": ("test_fleet_status_names_each_engine_and_the_agents_that_it_has_hot",),
        "kvasir gateway": ("test_the_gateway_of_several_engines_takes_the_homes_keys",),
        "kvasir fleet config": ("test_nginx_with_the_printed_configuration_keeps_an_agents_turns_at_one_engine",),
    },
    "docs/pages/fleet.md": {
        "createdb": ("test_a_fleet_is_built_as_on_its_page_and_an_agent_goes_on_at_another_engine",),
        "aws_access_key_id": ("test_a_fleet_is_built_as_on_its_page_and_an_agent_goes_on_at_another_engine",),
        "kvasir store serve": ("test_a_fleet_is_built_as_on_its_page_and_an_agent_goes_on_at_another_engine",),
        "kvasir up -d": ("test_a_fleet_is_built_as_on_its_page_and_an_agent_goes_on_at_another_engine",),
        "kvasir gateway": ("test_a_fleet_is_built_as_on_its_page_and_an_agent_goes_on_at_another_engine",),
    },
    "cachestore_svc/index/postgres/README.md": {
        "pip install 'kvasir[fleet]'": ("test_a_store_on_postgres_that_is_killed_goes_on",),
    },
    "clients/agents/README.md": {
        "export ANTHROPIC_BASE_URL": _AGENT_CLIENT,
        "export KVASIR_KEY": _AGENT_CLIENT,
        "export OPENCODE_CONFIG_CONTENT": _AGENT_CLIENT,
        "mkdir -p ~/.pi/agent": _AGENT_CLIENT,
        "cline auth": _AGENT_CLIENT,
        "from langchain_openai": _AGENT_CLIENT,
        "from pydantic_ai": _AGENT_CLIENT,
        "import { createOpenAICompatible }": _AGENT_CLIENT,
    },
    "clients/python/README.md": {
        "python3 -m venv": _INSTALLED,
        "from pathlib import Path": ("test_the_snippet_of_the_python_client_runs",),
    },
    "clients/go/README.md": {"go mod init": _INSTALLED, "package main": _OTHER_LANGUAGE},
    "clients/java/README.md": {"in=$(ls": _INSTALLED, "import static": _OTHER_LANGUAGE},
    "clients/rust/README.md": {"cargo init": _INSTALLED, "use kvasir_client": _OTHER_LANGUAGE},
    "clients/swift/README.md": {"unzip": _INSTALLED, "import Foundation": _OTHER_LANGUAGE},
    "clients/typescript/README.md": {"npm init": _INSTALLED, 'import { homedir } from "node:os"': _OTHER_LANGUAGE},
    "inference_svc/model/kvasir_tiny/MODEL_CARD.md": {
        "pip install": ("test_ten_steps_on_a_cpu_lower_the_loss_and_leave_a_model_that_loads",),
        "python -m tools.kvasir_tiny.wedlm.train": (
            "test_a_run_lowers_both_losses_and_one_that_was_interrupted_ends_with_the_same_bits",
        ),
    },
    "proto/README.md": {
        "buf generate": "its plugins come from buf's registry; `buf curl` asks the reflection that tests ask in Python",
        "1500000000000000": ("test_every_example_is_the_hash_of_its_bytes",),
        "0f00000000000000": ("test_every_example_is_the_hash_of_its_bytes",),
        "1600000000000000": ("test_every_example_is_the_hash_of_its_bytes",),
    },
    "compose/README.md": {
        "uv tool install": _INSTALLED,
        "kvasir up --model": "1.8 GB that no test fetches; its flags: test_every_flag_of_up_arrives_in_its_services",
        "kvasir up --listen": ("test_up_over_tcp_requests_its_token_hands_its_kv_policy_on_and_ends_whole",),
        "kvasir up -d": ("test_an_agent_moves_between_two_macs_as_compose_says",),
        "kvasir up": ("test_the_gateway_is_a_service_like_the_others",),
        "memory-gib = 16": ("test_every_option_of_a_settings_file_arrives_in_its_service",),
        "curl http": ("test_the_curl_of_the_readme_is_remembered",),
        "kvasir backup": ("test_a_restored_home_equals_the_old_one",),
        "kvasir agents export": (
            "test_an_archive_carries_a_memory_to_another_name",
            "test_the_seeds_form_carries_a_memory_there_and_back",
        ),
    },
    "clients/python/kvasir_orchestrator/README.md": {
        "pipx install": "`make try-wheel` installs the wheel; a test of every shipped scenario runs them",
        "name: two-rooms": ("test_the_scenario_of_the_page_is_right_and_ends_well",),
        "kvasir scenario run mine.yaml": (
            "test_a_dry_run_prints_every_prompt_and_the_reuse_it_will_get",
            "test_a_damaged_journal_is_said_and_fresh_begins_beside_it",
            "test_what_ships_is_listed_shown_and_described",
        ),
    },
}


def blocks() -> Iterator[tuple[str, str]]:
    """The file and the text of each block with a language, wherever a page shows it. Programs of `examples` have a
    test of their own."""
    for path in sorted(includes.PAGES.rglob("*.md")):
        page = path.relative_to(includes.PAGES).as_posix()
        yield from ((f"docs/pages/{page}", found[2]) for found in _BLOCK.finditer(path.read_text()))
        for source, anchor in includes.includes_of(page):
            if source.endswith(".md"):
                yield from ((source, found[2]) for found in _BLOCK.finditer(includes.included(source, anchor)))


def key_of(source: str, block: str) -> str | None:
    return next((key for key in SNIPPETS.get(source, ()) if block.startswith(key)), None)


def test_every_snippet_is_run_or_has_a_reason() -> None:
    found = [(source, key_of(source, block), block) for source, block in blocks()]
    assert [(source, block[:80]) for source, key, block in found if key is None] == []
    known = {(source, key) for source, keys in SNIPPETS.items() for key in keys}
    assert known - {(source, key) for source, key, _ in found} == set(), "it stands on no page any more"


def test_no_command_hides_in_a_block_without_a_language() -> None:
    pages = [page.relative_to(includes.PAGES).as_posix() for page in includes.PAGES.rglob("*.md")]
    sources = {source for page in pages for source, _ in includes.includes_of(page) if source.endswith(".md")}
    texts = {source: (ROOT / source).read_text() for source in sources}
    bare = [(source, block) for source, text in texts.items() for block in _BARE.findall(_BLOCK.sub("", text))]
    assert len(bare) > 3
    assert [source for source, block in bare if _TYPED.search(block)] == []


def test_the_tests_that_run_snippets_exist() -> None:
    there = {
        name for path in (ROOT / "tests").rglob("test_*.py") for name in re.findall(r"def (test_\w+)", path.read_text())
    }
    named = {
        name for keys in SNIPPETS.values() for tests in keys.values() if isinstance(tests, tuple) for name in tests
    }
    assert named - there == set()


def test_a_snippet_that_nobody_knows_is_noticed() -> None:
    assert key_of("README.md", "rm -rf ~/.kvasir\n") is None
    assert key_of("compose/README.md", "kvasir up --model x\n") == "kvasir up --model"
