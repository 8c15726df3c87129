"""The operator's page in a real browser, before real services: `make test-page` runs it, where Chromium and npm are."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.gateway.page.lives import endless_turn, live
from tests.gateway.page.paired import front_with_peer

HERE = Path(__file__).parent
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


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
    with tempfile.TemporaryDirectory() as root, front_with_peer(Path(root)) as (front, _):
        with front.house.client(front.keys["ada"]) as client:
            live(client)
        with endless_turn(front, "a long story"):
            told = {"KVASIR_URL": front.gateway.url, "KVASIR_KEY": front.keys["ada"]}
            own = {"KVASIR_OUT": str(folder), "CHROMIUM": chromium}
            walked = subprocess.run(["node", "walk.mjs"], cwd=folder, env={**os.environ, **told, **own}, timeout=900)
    return walked.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
