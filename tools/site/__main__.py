"""Write the pages of the documentation site, of which a builder makes HTML: `python -m tools.site DIRECTORY`."""

import shutil
import sys
from pathlib import Path

from tools.site import command_reference, grpc_reference, http_reference, includes


def write(directory: Path) -> None:
    """All pages, with drawings and pictures, in an empty directory."""
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(includes.PAGES, directory)
    known = includes.places()
    for page in directory.rglob("*.md"):
        text = http_reference.with_references(page.read_text())
        page.write_text(includes.expanded(page.relative_to(directory).as_posix(), text, known))
    for name, text in {**grpc_reference.pages(), "commands.md": command_reference.page()}.items():
        (directory / name).write_text(text)
    shutil.copytree(includes.ROOT / "compose/pictures", directory / "pictures")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
