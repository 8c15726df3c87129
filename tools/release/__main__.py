"""`make release`: build everything of the version that a tag names, under out/release. Nothing is uploaded.

    python -m tools.release [--try] [--out DIR] [--at URL]

Exits 0 when all was built (with --try: what this machine has the tools for), 1 when a build failed, 2 when the
release may not be made, with what to do."""

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tools.release import version as versions
from tools.release.packages import PACKAGES
from tools.release.version import ReleaseError

ROOT = Path(__file__).parents[2]
SUMS = "SHA256SUMS"


def main() -> int:
    parser = argparse.ArgumentParser(prog="make release", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--try", dest="attempt", action="store_true", help="no tag, and without packages whose tools are absent"
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "out" / "release", help="a new folder, or an earlier release"
    )
    parser.add_argument("--at", type=url, help="where the files will lie, for Homebrew; default: the folder itself")
    given = parser.parse_args()
    out = given.out.resolve()
    try:
        made = release(out, given.at or out.as_uri(), given.attempt)
    except ReleaseError as error:
        print(f"make release: {error}", file=sys.stderr)
        return 2
    except (subprocess.SubprocessError, OSError) as error:
        print(f"make release: {error}", file=sys.stderr)
        return 1
    print(f"Kvasir {made}: {len(sums(out).splitlines())} files under {out}, with their SHA-256 in {SUMS}")
    return 0


def release(out: Path, at: str, attempt: bool) -> str:
    """Build all, and let it take the place of the folder `out`, which stays as it is if a build fails; the version."""
    if out.exists() and not (out / SUMS).exists() and any(out.iterdir()):
        raise ReleaseError(f"{out} holds something else than a release, and would be removed: name another folder")
    version = versions.stated(ROOT)["pyproject.toml"] if attempt else versions.of_tag(ROOT)
    absent = {each.name: tool for each in PACKAGES if (tool := each.missing())}
    if absent and not attempt:
        needed = ", ".join(f"{tool} for {name}" for name, tool in absent.items())
        raise ReleaseError(
            f"a release is whole: install {needed}; `make release TRY=1` leaves out what cannot be built"
        )
    with tempfile.TemporaryDirectory(prefix="kvasir-release-") as folder:
        tree, made = Path(folder, "tree"), Path(folder, "release")
        copy_tracked(ROOT, tree)
        versions.write(tree, version)
        made.mkdir()
        for each in PACKAGES:
            if each.name in absent:
                print(f"{each.name}: LEFT OUT, no {absent[each.name]} here", file=sys.stderr)
            else:
                print(f"{each.name} …", file=sys.stderr, flush=True)
                each.build(tree, made, version)
        formula(made, version, at)
        (made / SUMS).write_text(sums(made), encoding="utf-8")
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(made, out)
    return version


def url(text: str) -> str:
    """A URL that can stand in a string of Ruby."""
    if not re.fullmatch(r"[a-z]+://[\w.~:/?&=%@+,-]+", text):
        raise argparse.ArgumentTypeError(f"expected a URL, such as https://example.org/kvasir, got {text!r}")
    return text.rstrip("/")


def copy_tracked(root: Path, tree: Path) -> None:
    """Copy the files that git knows, as they lie here."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (root / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / name, tree / name)


def formula(out: Path, version: str, at: str) -> None:
    archive = f"kvasir-{version}.tar.gz"
    facts = {"HOMEPAGE": at, "URL": f"{at}/{archive}", "SHA256": _sha256(out / archive)}
    text = Path(__file__).with_name("kvasir.rb").read_text(encoding="utf-8")
    for name, value in facts.items():
        text = text.replace(f"@{name}@", value)
    (out / "kvasir.rb").write_text(text, encoding="utf-8")


def sums(out: Path) -> str:
    """Lines for `sha256sum -c SHA256SUMS` in the folder."""
    files = sorted(path for path in out.rglob("*") if path.is_file() and path.name != SUMS)
    return "".join(f"{_sha256(file)}  {file.relative_to(out).as_posix()}\n" for file in files)


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
