"""One question to pydantic-ai with two tools; its thread goes on from a file. The model is the page's two lines."""

import sys
from pathlib import Path

from pydantic_ai import Agent
from pydantic_ai.messages import ModelMessagesTypeAdapter

THREAD = Path("thread.json")
exec(Path("setup.py").read_text())
agent = Agent(model, instructions=Path("instructions.txt").read_text())  # noqa: F821


@agent.tool_plain
def read_file(path: str) -> str:
    """The text of a file."""
    return Path(path).read_text()


@agent.tool_plain
def edit_file(path: str, old: str, new: str) -> str:
    """Replace a text in a file."""
    Path(path).write_text(Path(path).read_text().replace(old, new))
    return "done"


before = ModelMessagesTypeAdapter.validate_json(THREAD.read_bytes()) if THREAD.exists() else None
answer = agent.run_sync(sys.argv[1], message_history=before)
THREAD.write_bytes(answer.all_messages_json())
print(answer.output, answer.usage)
