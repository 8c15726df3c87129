"""The reference of the command line, from the help of each command."""

import re

from kvasir.cli.main import app
from typer.cli import get_docs_for_click
from typer.main import get_command

_HEADING = re.compile(r"^(#+) `([^`]+)`$", re.MULTILINE)


def page() -> str:
    """Every command with its options and their meaning."""
    command = get_command(app)
    text = get_docs_for_click(obj=command, ctx=command.context_class(command), name="kvasir")
    # "kvasir agents ls" is the title of a section, and its anchor is kvasir-agents-ls.
    text = _HEADING.sub(lambda found: f"{found[1]} {found[2]}", text).replace("\\[", "[")
    return text.replace("# kvasir\n", "# Every command\n", 1)
