"""`make test-install`: a release of this commit is built, and what the pages tell users to type is typed.

    python -m tests.install [--keep] [PART…]

Exits 0 when all that ran passed, 1 when one failed, 2 for a part that is not known. Each part has a home of its own,
where nothing is; what this machine has no tool for is NOT RUN, with the reason."""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from tests.install.formula import formula
from tests.install.image import image
from tests.install.pages import CLIENTS, ROOT, Client, python_lines
from tests.install.place import Failed, NotRun, Place, check_sums, talk
from tools.release.version import stated

Part = Callable[[Place], None]


def main() -> int:
    parts = all_parts()
    parser = argparse.ArgumentParser(prog="make test-install", description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"default: all of {', '.join(parts)}")
    parser.add_argument("--keep", action="store_true", help="leave the homes, whose folder is printed")
    given = parser.parse_args()
    if unknown := set(given.parts) - set(parts):
        print(f"not known: {', '.join(sorted(unknown))}; expected some of {', '.join(parts)}", file=sys.stderr)
        return 2
    # A path of few letters: the services' sockets lie below it.
    folder = Path(tempfile.mkdtemp(prefix="kvasir-install-", dir="/tmp"))
    folder.chmod(0o755)
    try:
        return run({name: parts[name] for name in given.parts or parts}, folder)
    finally:
        if given.keep:
            print(f"kept: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def all_parts() -> dict[str, Part]:
    lines = {{"python3": "pip"}.get(name, name): line for name, line in python_lines().items()}
    return {
        **{name: partial(command_line, name, line) for name, line in lines.items()},
        **{client.name: partial(try_client, client) for client in CLIENTS},
        "formula": formula,
        "image": image,
    }


def run(parts: dict[str, Part], folder: Path) -> int:
    place = Place(folder / "home")
    attempt("release", lambda: release(place.home / "kvasir"), must=True)
    ends = {name: attempt(name, partial(part, place)) for name, part in parts.items()}
    with suppress(Failed):
        stop(place)
    for end in ("passed", "FAILED", "NOT RUN"):
        named = [name for name in ends if ends[name] == end]
        print(f"{end}: {len(named)}{': ' if named else ''}{', '.join(named)}")
    return 1 if "FAILED" in ends.values() else 0


def attempt(name: str, part: Callable[[], None], must: bool = False) -> str:
    """Run a part and report its end; with `must` a failure ends all."""
    began, end, why = time.monotonic(), "passed", ""
    try:
        part()
    except NotRun as error:
        end, why = "NOT RUN", f": {error}"
    except (Failed, OSError, subprocess.SubprocessError) as error:
        end, why = "FAILED", f": {error}"
    print(f"{name}: {end}, {time.monotonic() - began:.0f} s{why}", flush=True)
    if must and end != "passed":
        sys.exit(1)
    return end


def release(clone: Path) -> None:
    """Build the release of a clone of this commit, which alone gets the tag of the version that it has."""
    clone.parent.mkdir()
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    subprocess.run(["git", "tag", f"v{stated(clone)['pyproject.toml']}"], cwd=clone, check=True)
    done = subprocess.run(
        [sys.executable, "-m", "tools.release"], cwd=clone, env={**Place(clone).environment(), **own_path()},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise Failed(done.stderr[-1500:])
    check_sums(clone / "out" / "release")


def own_path() -> dict[str, str]:
    """The home of whoever builds: its caches are no part of what is tested."""
    return {"HOME": str(Path.home()), "MAVEN_OPTS": ""}


def command_line(name: str, line: str, place: Place) -> None:
    """The line puts `kvasir` into a home, and it serves an agent who remembers."""
    own = place.another(name)
    own.path = [own.home / ".local" / "bin", own.home / "kvasir-env" / "bin"]
    if name in ("uv", "pipx") and shutil.which(name) is None:
        own.path.append(installers(place.home.parent / "installers"))
    own.run(line)
    talk(own)


def installers(folder: Path) -> Path:
    """uv and pipx of the registry, where the machine has none."""
    if not folder.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([str(folder / "bin" / "pip"), "install", "--quiet", "uv", "pipx"], check=True)
    return folder / "bin"


def try_client(client: Client, place: Place) -> None:
    """The line of a client's page makes its program run in an empty folder, beside a `kvasir up`."""
    if shutil.which(client.tool) is None:
        raise NotRun(f"no {client.tool} here")
    start(place)
    folder = place.home / client.name
    folder.mkdir()
    place.run(client.line, folder)
    for name, text in {client.file: client.program, **client.beside}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    up = json.loads((place.home / ".kvasir" / "run" / "up.json").read_text(encoding="utf-8"))
    printed = place.run(f"KVASIR_URL=http://{up['http']} {client.run}", folder)
    if re.search(client.prints, printed) is None:
        raise Failed(f"the program of its page printed {printed!r}")


def start(place: Place) -> None:
    """The `kvasir up` that all clients call: this checkout's, in the home that their programs name."""
    if not (place.home / ".kvasir" / "run" / "up.json").exists():
        place.run(f"{own_kvasir()} up -d")


def stop(place: Place) -> None:
    if (place.home / ".kvasir").exists():
        place.run(f"{own_kvasir()} down")


def own_kvasir() -> str:
    return f"PYTHONPATH={ROOT}:{ROOT / 'clients/python'} {sys.executable} -m kvasir"


if __name__ == "__main__":
    sys.exit(main())
