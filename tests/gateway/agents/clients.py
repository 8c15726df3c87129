"""The agent clients: from which registry each comes, and its task: an edit in a tool loop, a resume, a compaction."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[3] / "clients" / "agents" / "README.md"
HERE = Path(__file__).parent
# The page's own, which the test replaces.
ADDRESS, NAME = "127.0.0.1:8642", "kvasir-tiny"
EDIT, LOOK, MORE = "Make the colour blue.", "Count the words.", "What did I ask before?"
Reply = Mapping[str, Any]


@dataclass(frozen=True)
class Client:
    """`edits`, `looks`: the replies to the first two questions; {file} stands for the file's path. `ask`, `again`: what
    follows the page's last line for the first question, and for a later one; or lines of a shell with this line as
    {start}, as `compact`, which lets it compact. {tokens}: the last prompt's length; {done}: the model's last words.
    """

    title: str  # the page's
    package: str
    edits: Sequence[Reply]
    looks: Sequence[Reply] = ()
    ask: str = "{question}"
    again: str = "{question}"
    compact: str = ""
    few: str = ""  # arguments that leave most tools out
    prepare: str = ""
    program: str = ""  # of ours, for a framework
    environment: Mapping[str, str] = field(default_factory=dict)


def call(name: str, **arguments: Any) -> Reply:
    return {"call": name, "arguments": arguments}


_FRAMEWORK: Sequence[Reply] = (
    call("read_file", path="{file}"),
    call("edit_file", path="{file}", old="red", new="blue"),
    call("read_file", path="{file}"),
)
_SUBTASK = "How many words does notes.txt have?"
OURS = (_SUBTASK, "the colour is red", "the colour is blue")
_CLAUDE = "--output-format json --permission-mode acceptEdits --allowedTools Read,Edit,Bash,Agent {few}"
# The one call of its server's that a person's /compact makes.
_OPENCODE = """{start} serve --port 0 > server.log 2>&1 & server=$!
for each in $(seq 120); do grep -q listening server.log && break; sleep 1; done
url=$(grep -o 'http://127.0.0.1:[0-9]*' server.log)
id=$(curl -sf $url/session | python3 -c 'import json, sys
print([each["id"] for each in json.load(sys.stdin) if not each.get("parentID")][0])')
curl -sf $url/session/$id/summarize -H 'content-type: application/json' \\
  -d '{{"providerID": "kvasir", "modelID": "kvasir-tiny"}}'
kill -9 $server"""
_PI = """(echo '{{"type": "compact", "id": "1"}}'
for each in $(seq 300); do grep -q compaction_end rpc.out && break; sleep 1; done) | {start} -c --mode rpc > rpc.out
grep -q '"success":true' rpc.out"""
# It resumes at a terminal alone. Its file has a reply once the turn has ended; what is on the screen is drawn again.
_CLINE = """id=$(cline history --json | python3 -c 'import json, sys; print(json.load(sys.stdin)[0]["sessionId"])')
replies() {{ grep -o {done} ~/.cline/data/sessions/$id/*.messages.json | wc -l; }}
before=$(replies)
(for each in $(seq 120); do grep -q done tty.out && break; sleep 0.5; done; sleep 2
for each in $(seq 8); do printf %s {question}; sleep 1; printf '\\r'  # again, where it did not listen yet
for wait in $(seq 80); do test $(replies) -gt $before && break 2; sleep 0.5; done; done
for each in 1 2 3; do sleep 1; printf '\\003'; done) |
  TERM=xterm-256color script -qfc "stty cols 120 rows 40; {start} --id $id" tty.out > /dev/null
test $(replies) -gt $before"""
_CODEX = "exec resume --last --skip-git-repo-check --json {question}"
CLIENTS: Mapping[str, Client] = {
    "claude": Client(
        "Claude Code",
        "@anthropic-ai/claude-code",
        edits=(
            call("Read", file_path="{file}"),
            call("Edit", file_path="{file}", old_string="red", new_string="blue"),
            call("Bash", command="cat notes.txt", description="show it"),
        ),
        looks=(call("Agent", description="count", prompt=_SUBTASK, subagent_type="general-purpose"),),
        ask="-p {question} " + _CLAUDE,
        again="-c -p {question} " + _CLAUDE,
        compact="{start} -c -p /compact " + _CLAUDE,
        few="--tools Read,Edit,Bash,Agent --system-prompt-file instructions.txt",
        environment={
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_TELEMETRY": "1",
            "DISABLE_AUTOUPDATER": "1",
        },
    ),
    "codex": Client(
        "Codex",
        "@openai/codex",
        edits=(
            call("exec_command", cmd="cat notes.txt"),
            call("exec_command", cmd="sed -i s/red/blue/ notes.txt"),
            call("exec_command", cmd="cat notes.txt"),
        ),
        looks=(call("exec_command", cmd="wc -w notes.txt"),),
        ask="exec --skip-git-repo-check --json -s danger-full-access {question}",
        again=_CODEX,
        compact="{start} -c model_auto_compact_token_limit={tokens} " + _CODEX,
    ),
    "opencode": Client(
        "opencode",
        "opencode-ai",
        edits=(
            call("read", filePath="{file}"),
            call("edit", filePath="{file}", oldString="red", newString="blue"),
            call("bash", command="cat notes.txt", description="show it"),
        ),
        looks=(call("task", description="count", prompt=_SUBTASK, subagent_type="general"),),
        ask="run {question}",
        again="run -c {question}",
        compact=_OPENCODE,
        prepare="git init -q .",
    ),
    "pi": Client(
        "pi",
        "@mariozechner/pi-coding-agent",
        edits=(
            call("read", path="notes.txt"),
            call("edit", path="notes.txt", edits=[{"oldText": "red", "newText": "blue"}]),
            call("bash", command="cat notes.txt"),
        ),
        looks=(call("bash", command="wc -w notes.txt"),),
        ask="-p {question}",
        again="-c -p {question}",
        compact=_PI,
        prepare='mkdir -p ~/.pi/agent; echo \'{"compaction": {"keepRecentTokens": 50}}\' > ~/.pi/agent/settings.json',
        environment={"PI_OFFLINE": "1", "PI_TELEMETRY": "0"},
    ),
    "cline": Client(
        "Cline",
        "cline",
        edits=(
            call("read_files", files=[{"path": "{file}"}]),
            call("editor", path="{file}", old_text="red", new_text="blue"),
            call("run_commands", commands=["cat notes.txt"]),
        ),
        looks=(call("run_commands", commands=["wc -w notes.txt"]),),
        ask="--json {question}",
        again=_CLINE,
    ),
    "langgraph": Client("LangGraph", "langgraph langchain-openai", _FRAMEWORK, program="langgraph_talk.py"),
    "pydantic-ai": Client("pydantic-ai", "pydantic-ai-slim[openai]", _FRAMEWORK, program="pydantic_ai_talk.py"),
    "ai-sdk": Client("Vercel AI SDK", "ai @ai-sdk/openai-compatible zod", _FRAMEWORK, program="ai_sdk_talk.mjs"),
}


def setup_of(client: Client, address: str) -> str:
    """The page's two lines, with another address of the gateway's."""
    match = re.search(rf"^## {re.escape(client.title)}\n+```\w+\n(.*?)\n```$", PAGE.read_text(), re.M | re.S)
    assert match is not None, f"{PAGE} has no lines for {client.title}"
    assert ADDRESS in match[1]
    return match[1].replace(ADDRESS, address)


def script_of(client: Client, file: Path) -> dict[str, list[Reply]]:
    """What the model replies to each question."""

    def placed(reply: Reply) -> Reply:
        text = json.dumps(reply).replace("{file}", str(file))
        return dict(json.loads(text))

    return {EDIT: [placed(each) for each in client.edits], LOOK: [placed(each) for each in client.looks]}
