"""One question to LangGraph with two tools; its thread goes on from a file. The model is the page's two lines."""

import json
import sys
from pathlib import Path

from langchain_core.messages import messages_from_dict, messages_to_dict
from langgraph.prebuilt import create_react_agent

THREAD = Path("thread.json")
SYSTEM = Path("instructions.txt").read_text()


def read_file(path: str) -> str:
    """The text of a file."""
    return Path(path).read_text()


def edit_file(path: str, old: str, new: str) -> str:
    """Replace a text in a file."""
    Path(path).write_text(Path(path).read_text().replace(old, new))
    return "done"


exec(Path("setup.py").read_text())
agent = create_react_agent(model, [read_file, edit_file], prompt=SYSTEM)  # noqa: F821
before = messages_from_dict(json.loads(THREAD.read_text())) if THREAD.exists() else []
answer = agent.invoke({"messages": [*before, ("user", sys.argv[1])]})
THREAD.write_text(json.dumps(messages_to_dict(answer["messages"])))
print(answer["messages"][-1].content, json.dumps(answer["messages"][-1].usage_metadata))
