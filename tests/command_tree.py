"""The tree of `kvasir`'s commands, made once: in this process, and in the one that forks programs before it does. Each
command would take 30 ms for it, and none changes it.
"""

import functools
import os
from typing import Any

import typer.main
from kvasir.cli.main import app

# Completion is for the shell that is named, whichever shell the tests run under. It is read while the tree is made.
os.environ["_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION"] = "1"
typer.main.get_command = functools.cache(typer.main.get_command)
TREE: Any = typer.main.get_command(app)
