"""Agent clients, unmodified, before real services: `make test-agents` runs it. Two turns each, both services killed,
a third turn: no request is refused, and from the second turn on at least 98 % of the prompt was not computed.

They are installed from npm with their binaries, into a folder of their own, and run with an empty environment and home.
The model has kvasir-tiny's weights and a long context: its answers are nonsense there, its prompts are real.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from inference_svc.model import kvasir_tiny
from tests.gateway.conftest import Front, running_front
from tests.gateway.serving import MODEL

PACKAGES = {"claude": "@anthropic-ai/claude-code", "codex": "@openai/codex"}
QUESTIONS = ("My name is Anna.", "What is my name?", "And what did I ask before?")
CONTEXT_TOKENS = 65_536
LEAST_CACHED = 0.98
WITHIN_S = 900
# Claude Code's whole set of tools is 64 KB of schemas, which take minutes here.
FEW_TOOLS = ("--tools", "Read,Edit", "--system-prompt", "Be careful, and say what you do. " * 300)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 if a client failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the clients are installed")
    parser.add_argument("names", nargs="*", default=list(PACKAGES), metavar="CLIENT", help=", ".join(PACKAGES))
    parser.add_argument("--whole", action="store_true", help="with all tools and texts of the clients: minutes")
    given = parser.parse_args(arguments)
    if shutil.which("npm") is None:
        print("no npm here: nothing was tried")
        return 1
    folder = given.folder.resolve()
    for name in given.names:
        install(folder, PACKAGES[name])
    with tempfile.TemporaryDirectory() as root:
        model = long_model(Path(root) / MODEL)
        with running_front(Path(root) / "front", model=model, engine_options=("--memory-gib", "1")) as front:
            talks = [Talk(name, front, folder, Path(root) / name, given.whole) for name in given.names]
            passed = [talk.turns(QUESTIONS[:2]) for talk in talks]
            front.house.restart()
            passed += [talk.turns(QUESTIONS[2:]) for talk in talks]
            refused = [line for line in front.gateway.log.splitlines() if "request.refused" in line]
            ignored = [line for line in front.gateway.log.splitlines() if "request.ignored" in line]
    print(*ignored, *refused, sep="\n")
    return 0 if all(passed) and not refused else 1


def install(folder: Path, package: str) -> None:
    if not (folder / "node_modules" / package).exists():
        folder.mkdir(parents=True, exist_ok=True)
        npm = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(folder), package]
        subprocess.run(npm, check=True)


def long_model(folder: Path) -> Path:
    """The weights of kvasir-tiny, with room for an agent's prompt."""
    shutil.copytree(kvasir_tiny.path(), folder)
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "max_position_embeddings": CONTEXT_TOKENS}))
    return folder


@dataclass(frozen=True)
class Used:
    """Tokens of a turn's prompt, as the client counts them."""

    prompt: int
    cached: int


class Talk:
    """One client in a home and a folder of its own."""

    def __init__(self, name: str, front: Front, installed: Path, home: Path, is_whole: bool) -> None:
        self.name = name
        self._url, self._key = front.gateway.url, front.keys["ada"]
        self._program = str(installed / "node_modules" / ".bin" / name)
        self._home = home
        self._is_whole = is_whole
        self._asked = 0
        self._before = Used(0, 0)
        (home / "work").mkdir(parents=True)
        if name == "codex":
            (home / ".codex").mkdir()
            (home / ".codex" / "config.toml").write_text(self._codex_settings())

    def turns(self, questions: Sequence[str]) -> bool:
        """Whether all went as they should."""
        ended = [self._turn(question) for question in questions]
        return all(ended)

    def _turn(self, question: str) -> bool:
        self._asked += 1
        command = self._claude(question) if self.name == "claude" else self._codex(question)
        began = time.monotonic()
        environment = {"PATH": os.environ["PATH"], "HOME": str(self._home), **self._environment()}
        ended = subprocess.run(
            [self._program, *command],
            cwd=self._home / "work",
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=WITHIN_S,
            check=False,
        )
        used = self._used(ended.stdout)
        share = used.cached / max(used.prompt, 1)
        is_well = ended.returncode == 0 and used.prompt > 0 and (self._asked == 1 or share >= LEAST_CACHED)
        told = f"{used.cached:,} of {used.prompt:,} cached in {time.monotonic() - began:.1f} s"
        print(f"{self.name}, turn {self._asked}: {told}{'' if is_well else ' - FAILED'}", flush=True)
        if not is_well:
            print(ended.returncode, ended.stdout[-2000:], ended.stderr[-2000:], flush=True)
        return is_well

    def _environment(self) -> dict[str, str]:
        return {
            "ANTHROPIC_BASE_URL": self._url,
            "ANTHROPIC_AUTH_TOKEN": self._key,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_TELEMETRY": "1",
            "DISABLE_AUTOUPDATER": "1",
            "KVASIR_KEY": self._key,
        }

    def _claude(self, question: str) -> list[str]:
        goes_on = ["-c"] if self._asked > 1 else []
        return [*goes_on, "-p", question, "--output-format", "json", *(() if self._is_whole else FEW_TOOLS)]

    def _codex(self, question: str) -> list[str]:
        settings = ["--skip-git-repo-check", "--json"]
        if self._asked > 1:
            return ["exec", "resume", "--last", *settings, question]
        return ["exec", *settings, "-s", "read-only", question]

    def _codex_settings(self) -> str:
        return (
            'model = "gpt-oss"\nmodel_provider = "kvasir"\n[model_providers.kvasir]\nname = "kvasir"\n'
            f'base_url = "{self._url}/v1"\nenv_key = "KVASIR_KEY"\nwire_api = "responses"\n'
        )

    def _used(self, out: str) -> Used:
        """From what the client prints: Claude Code one object, Codex a line an event."""
        used = Used(0, 0)
        for line in out.splitlines():
            try:
                usage = json.loads(line).get("usage") or {}
            except (ValueError, AttributeError):
                continue
            read = usage.get("cache_read_input_tokens", 0)
            if "cached_input_tokens" in usage:  # of the thread until now
                total, before = Used(usage["input_tokens"], usage["cached_input_tokens"]), self._before
                used, self._before = Used(total.prompt - before.prompt, total.cached - before.cached), total
            elif "input_tokens" in usage:
                used = Used(usage["input_tokens"] + read, read)
        return used


if __name__ == "__main__":
    sys.exit(main())
