"""The operator's page in a real browser, before real services: `make test-page` runs it, where Chromium and npm are."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from inference_svc.model import kvasir_tiny
from tests.cli.local_hub import local_hub
from tests.cli.running import free_port
from tests.gateway.page.lives import endless_turn, live
from tests.gateway.page.paired import front_with_peer

HERE = Path(__file__).parent
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@contextmanager
def operated_home(root: Path) -> Iterator[dict[str, str]]:
    """A home that `kvasir up` runs, with one backup, a hub of one model, and another home that can take a code."""
    kvasir = [sys.executable, "-m", "kvasir", "--home"]
    home, other = str(root / "h"), str(root / "o")
    shutil.copytree(kvasir_tiny.path(), root / "hub" / "kvasir" / "tiny")
    with local_hub(root / "hub", root / "cache") as environment:
        up = [*kvasir, home, "up", "-d", "--json", "--http", f"127.0.0.1:{free_port()}"]
        begun = subprocess.run(up, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True, check=True)
        try:
            subprocess.run([*kvasir, home, "backup", str(root / "backup")], check=True)
            yield {
                "KVASIR_HOME_URL": json.loads(begun.stdout)["http_url"].removesuffix("/v1"),
                "KVASIR_HOME_KEY": (root / "h" / "tokens" / "operator@home.token").read_text().strip(),
                "KVASIR_PAIR": json.dumps([*kvasir, other, "pair", "--name", "laptop"]),
            }
        finally:
            subprocess.run([*kvasir, home, "down"], check=False)


def main(arguments: Sequence[str]) -> int:
    """Returns 1 if something is wrong with a page. The argument is the folder for the browser's tools and pictures."""
    chromium = next(filter(None, map(shutil.which, BROWSERS)), None)
    if chromium is None or shutil.which("npm") is None:
        print(f"the page in a browser: left out, there is no {'npm' if chromium else 'Chromium'} here")
        return 0
    folder = Path(arguments[0]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("package.json", "walk.mjs"):
        shutil.copy(HERE / name, folder / name)
    if not (folder / "node_modules").exists():
        subprocess.run(["npm", "install", "--silent", "--no-audit", "--no-fund"], cwd=folder, check=True)
    with (
        tempfile.TemporaryDirectory() as root,
        operated_home(Path(root)) as home,
        front_with_peer(Path(root)) as (
            front,
            _,
        ),
    ):
        with front.house.client(front.keys["ada"]) as client:
            live(client)
        with endless_turn(front, "a long story"):
            told = {"KVASIR_URL": front.gateway.url, "KVASIR_KEY": front.keys["ada"]}
            told |= home
            own = {"KVASIR_OUT": str(folder), "CHROMIUM": chromium}
            walked = subprocess.run(["node", "walk.mjs"], cwd=folder, env={**os.environ, **told, **own}, timeout=900)
    return walked.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
