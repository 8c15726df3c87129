"""Agent clients, unmodified, before real services: `make test-agents` runs it. Each edits a file by calls of its tools,
goes on after both services were killed, and compacts its history; the set-up is the page's own two lines.

They are installed from npm and PyPI into a folder of their own, and run with an empty environment and home. The model
has some of kvasir-tiny's weights and a long context, and a script decides what it replies: the prompts are measured.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx

from inference_svc.model import kvasir_tiny
from tests.gateway.agents.clients import CLIENTS, EDIT, HERE, LOOK, MORE, script_of, setup_of
from tests.gateway.agents.recorder import Exchange, Recorder, computed_twice, goes_on
from tests.gateway.agents.recording import recorded
from tests.gateway.agents.scripted_engine import DONE, SCRIPT
from tests.gateway.conftest import Front, running_front
from tests.gateway.serving import MODEL

CONTEXT_TOKENS = 65_536
_OTHER_LAYERS = re.compile(r"model\.layers\.[1-9]\.")
WITHIN_S = 1500
INSTRUCTIONS = "Be careful, read before you write, and say what you do. "


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 if a client failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the clients are installed")
    parser.add_argument("names", nargs="*", metavar="CLIENT", help=f"{', '.join(CLIENTS)}; left out: all")
    parser.add_argument("--whole", action="store_true", help="Claude Code with all its tools and texts: many minutes")
    parser.add_argument("--record", type=Path, metavar="DIR", help="write what they send there, without their texts")
    given = parser.parse_args(arguments)
    if shutil.which("npm") is None:
        print("no npm here: nothing was tried")
        return 1
    passed = []
    with tempfile.TemporaryDirectory() as root:
        model = long_model(Path(root) / MODEL)
        options = ("--memory-gib", "2")
        with running_front(
            Path(root) / "front", model=model, engine="scripted_engine", engine_options=options
        ) as front:
            for name in given.names or CLIENTS:
                talk = Talk(name, front, install(given.folder.resolve(), name), Path(root) / name, given.whole)
                passed.append(talk.run())
                if given.record is not None:
                    recorded(CLIENTS[name], talk.exchanges, given.record / f"{name}.jsonl")
            ignored = [line for line in front.gateway.log.splitlines() if "request.ignored" in line]
    print(*ignored, sep="\n")
    return 0 if all(passed) else 1


def install(folder: Path, name: str) -> Path:
    """The folder of its programs."""
    client, own = CLIENTS[name], folder / name
    if client.program.endswith(".py"):
        if not (own / "bin" / "python").exists():
            subprocess.run([sys.executable, "-m", "venv", own], check=True)
            pip = [own / "bin" / "python", "-m", "pip", "install", "-q", "--disable-pip-version-check"]
            subprocess.run([*pip, *client.package.split()], check=True)
        return own / "bin"
    if not (own / "node_modules").exists():
        own.mkdir(parents=True, exist_ok=True)
        npm = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(own)]
        subprocess.run([*npm, *client.package.split()], check=True)
    return own / "node_modules" / ".bin"


def long_model(folder: Path) -> Path:
    """One of kvasir-tiny's layers, with room for an agent's prompt: what a reply says means nothing there."""
    shutil.copytree(kvasir_tiny.path(), folder)
    weights = mx.load(str(folder / "model.safetensors"))
    kept = {name: weight for name, weight in weights.items() if not _OTHER_LAYERS.match(name)}
    mx.eval(kept)
    (folder / "model.safetensors").unlink()
    mx.save_safetensors(str(folder / "model.safetensors"), kept, {"format": "mlx"})
    file = folder / "config.json"
    settings = {"max_position_embeddings": CONTEXT_TOKENS, "num_hidden_layers": 1}
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))
    return folder


class Talk:
    """One client in a home and a folder of its own."""

    def __init__(self, name: str, front: Front, programs: Path, home: Path, is_whole: bool) -> None:
        self.name, self._front, self._programs, self._home = name, front, programs, home
        self._client = CLIENTS[name]
        self._few = "" if is_whole else self._client.few
        self._work, self.file = home / "work", home / "work" / "notes.txt"
        self._work.mkdir(parents=True)
        self._recorder = Recorder(front.gateway.port)
        (home / ".kvasir/tokens").mkdir(parents=True)
        (home / ".kvasir/tokens/client.token").write_text(front.keys["ada"])
        (self._work / "instructions.txt").write_text(INSTRUCTIONS * 200)
        self.file.write_text("the colour is red\n")
        (front.house.root / SCRIPT).write_text(json.dumps(script_of(self._client, self.file)))

    @property
    def exchanges(self) -> Sequence[Exchange]:
        return self._recorder.exchanges

    def run(self) -> bool:
        """Whether all went as it should."""
        ended = [self._step("edit", self._asked(self._client.ask, EDIT))]
        if self.file.read_text() != "the colour is blue\n":
            print(
                f"{self.name}: FAILED, the file was not edited:",
                (self._home / "edit.out").read_text()[-2000:],
                flush=True,
            )
            ended.append(False)
        self._front.house.restart()
        ended.append(self._step("resume", self._asked(self._client.again, LOOK)))
        if self._client.compact:
            ended.append(self._step("compact", self._asked(self._client.compact, LOOK)))
            ended.append(self._step("after", self._asked(self._client.again, MORE)))
        self._recorder.close()
        return all(ended) and self._is_reused()

    def _asked(self, lines: str, question: str) -> str:
        lines = lines if "{start}" in lines else f"{{start}} {lines}"
        return lines.replace("{start}", self._start).format(**self._values(question))

    @property
    def _start(self) -> str:
        """The page's last line, or our program that uses both."""
        program = self._client.program
        if not program:
            return setup_of(self._client, self._address).splitlines()[-1].replace("{", "{{").replace("}", "}}")
        return f"python {HERE / program}" if program.endswith(".py") else f"node {self._programs.parents[1] / program}"

    @property
    def _address(self) -> str:
        return f"127.0.0.1:{self._recorder.port}"

    def _values(self, question: str) -> dict[str, str]:
        tokens = self.exchanges[-1].tokens[0] if self.exchanges else 0
        quoted = {"question": shlex.quote(question), "done": shlex.quote(DONE)}
        return {**quoted, "few": self._few, "tokens": str(tokens - 100)}

    def _first_lines(self) -> str:
        setup, program = setup_of(self._client, self._address), self._client.program
        if program.endswith(".py"):
            (self._work / "setup.py").write_text(setup)
            return ""
        if program:
            file = self._programs.parents[1] / program
            file.write_text(setup + "\n" + (HERE / program).read_text())
            return ""
        return "\n".join(setup.splitlines()[:-1])

    def _step(self, name: str, command: str) -> bool:
        lines = "\n".join([self._client.prepare, self._first_lines(), command])
        path = f"{self._programs}:{os.environ['PATH']}"
        began, before = time.monotonic(), len(self.exchanges)
        process = subprocess.Popen(
            ["bash", "-c", lines],
            cwd=self._work,
            env={"PATH": path, "HOME": str(self._home), **self._client.environment},
            stdin=subprocess.DEVNULL,
            stdout=(self._home / f"{name}.out").open("wb"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(WITHIN_S)
        finally:
            for group in _groups_below(self._home):
                os.killpg(group, signal.SIGKILL)
        took = time.monotonic() - began
        sent = self.exchanges[before:]
        refused = [each for each in sent if each.status != 200]
        is_well = code == 0 and not refused and bool(sent)
        print(f"{self.name}, {name}: {took:.1f} s{'' if is_well else f' - FAILED with {code}'}", flush=True)
        for each in sent:
            self._show(each)
        if not is_well:
            print((self._home / f"{name}.out").read_text()[-1500:], *(each.events for each in refused[:1]), flush=True)
            print(self._front.failures(), flush=True)
        return is_well

    def _show(self, each: Exchange) -> None:
        tokens, cached = each.tokens
        what = each.headers.get("x-kvasir-side-call") or each.headers.get("x-agent-memory", "")
        print(
            f"  {cached:>7,} of {tokens:>7,} cached  {what:10} {each.headers.get('x-agent-id', '')[-12:]}", flush=True
        )

    def _is_reused(self) -> bool:
        """From a conversation's second turn on nothing is computed twice."""
        shares = [cached / tokens for tokens, cached in (each.tokens for each in self.exchanges if goes_on(each))]
        begun = [each for each in self.exchanges if each.headers.get("x-agent-memory") == "new"]
        twice = computed_twice(self.exchanges)
        told = f"{len(begun)} memories, median {statistics.median(shares):.2%} cached, worst {min(shares):.2%}"
        print(f"{self.name}: {told}{f' - FAILED, computed twice: requests {twice}' if twice else ''}", flush=True)
        return not twice


def _groups_below(home: Path) -> set[int]:
    """Process groups that a client has left behind: those whose home is this one."""
    groups = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"HOME={home}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                groups.add(os.getpgid(int(folder.name)))
        except OSError:
            continue
    return groups - {os.getpgid(0)}


if __name__ == "__main__":
    sys.exit(main())
