"""`make test-templates`: chat templates as their makers published them, where the tests beside have our own words.

A source archive on PyPI holds them; nothing of it comes into this repository. Of each family: which thoughts its
template keeps, and whether a reply, told in parts and sent back, makes the prompt of a reply that never left.
"""

import json
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from kvasir.cachestore.v1 import manifest_pb2
from mlx_lm.tokenizer_utils import load as load_tokenizer

from inference_svc.model import kvasir_tiny
from inference_svc.model.prompting import Prompting
from inference_svc.text.token_text import TokenText
from tests.inference.text.templates.test_thoughts_of_templates import (
    ASKED,
    CALL,
    CALLS,
    RESULT,
    assistant,
    replied,
    text_of,
)

PACKAGE = "llama-cpp-python==0.3.36"
_MARKERS = re.compile(r"<[|｜/]?[A-Za-z_][^<>\s'\"{}]*>|<\|[^<>\s'\"{}]*\|>|\[/?[A-Z_]{3,}\]|\[e~\[|\]~b\]|\]~!b\[")
_MORE = {"<|channel|>": ("<|constrain|>", "<|call|>", "<|return|>"), "</think>": ("<think>",)}
_NEXT = manifest_pb2.Message(role="user", content="And in Rome?")


ONLY_THOUGHTFUL, NO_THOUGHTS, NO_CALLS, NO_ANSWERS = "thoughtless", "thoughts", "calls", "answers"
ONE_CALL, NO_TEXT_BEFORE_CALLS, NO_THOUGHTS_BEFORE_ANSWERS = "two", "text and calls", "thoughts and answer"


class Family:
    """`kept`: of three thoughts those in the prompt. `never`: kinds of replies that its models do not write, that
    mlx-lm has no parser for, or whose thoughts the template drops at once. `end`, `call_end`: tokens that end an
    answer, a call.
    """

    def __init__(
        self, *kept: int, never: str | tuple[str, ...] = (), end: str = "<|im_end|>", call_end: str = ""
    ) -> None:
        self.kept = kept
        self.end, self.call_end = end, call_end or end
        self._never = {never} if isinstance(never, str) else {*never}

    def writes(self, reasoning: str, content: str, calls: int) -> bool:
        kinds = {NO_THOUGHTS if reasoning else ONLY_THOUGHTFUL, NO_CALLS if calls else NO_ANSWERS}
        kinds |= {ONE_CALL} if calls > 1 else set()
        kinds |= {NO_TEXT_BEFORE_CALLS} if content and calls else set()
        kinds |= {NO_THOUGHTS_BEFORE_ANSWERS} if reasoning and not calls else set()
        return bool(content or calls) and self._never.isdisjoint(kinds)


_DEEPSEEK = "<｜end▁of▁sentence｜>"
FAMILIES = {
    "Qwen-Qwen3-0.6B": Family(3, never=ONLY_THOUGHTFUL),
    "Qwen3.5-4B": Family(3, never=ONLY_THOUGHTFUL),
    "openai-gpt-oss-120b": Family(3, never=(ONE_CALL, NO_TEXT_BEFORE_CALLS), end="<|return|>", call_end="<|call|>"),
    "GLM-4.6": Family(3, end="<|user|>", call_end="<|observation|>"),
    "GLM-4.7-Flash": Family(3, never=ONLY_THOUGHTFUL, end="<|user|>", call_end="<|observation|>"),
    "MiniMax-M2": Family(3, never=ONLY_THOUGHTFUL, end="[e~["),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": Family(never=(NO_CALLS, NO_ANSWERS), end=_DEEPSEEK),
    "deepseek-ai-DeepSeek-V3.1": Family(never=(NO_THOUGHTS, NO_CALLS), end=_DEEPSEEK),
    "deepseek-ai-DeepSeek-V3.2": Family(3, never=NO_CALLS, end=_DEEPSEEK),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": Family(3, never=ONLY_THOUGHTFUL),
    "google-gemma-4-31B-it": Family(
        3, never=(NO_TEXT_BEFORE_CALLS, NO_THOUGHTS_BEFORE_ANSWERS), end="<turn|>", call_end="<|tool_response>"
    ),
    "Kimi-K3": Family(1, 2, 3, end="<|end_of_msg|>"),
    "Qwen-Qwen2.5-7B-Instruct": Family(never=NO_THOUGHTS),
    "Qwen3-Coder": Family(never=NO_THOUGHTS),
    "ibm-granite-granite-4.0": Family(never=NO_THOUGHTS, end="<|end_of_text|>"),
    "unsloth-mistral-Devstral-Small-2507": Family(never=NO_THOUGHTS),
}


def main() -> int:
    """Returns 1 if a family is treated otherwise than here. The argument: the folder for the texts."""
    folder = Path(sys.argv[1]).resolve()
    sources = published(folder)
    problems = 0
    for name, family in FAMILIES.items():
        wrong = list(wrongs(prompting_of(folder / name, sources[name]), family))
        print(f"{name}: {'as published' if not wrong else ''}", *wrong, sep="\n  ")
        problems += len(wrong)
    return 1 if problems else 0


def published(folder: Path) -> dict[str, str]:
    """The templates' texts by name."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (archives := list(folder.glob("*.tar.gz"))):
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "-d", folder]
        subprocess.run([*command, PACKAGE], check=True)
        archives = list(folder.glob("*.tar.gz"))
    found = {}
    with tarfile.open(archives[0]) as archive:
        for member in archive:
            if member.name.endswith(".jinja") and "/models/templates/" in member.name:
                file = archive.extractfile(member)
                assert file is not None
                found[Path(member.name).stem] = file.read().decode()
    return found


def prompting_of(directory: Path, source: str) -> Prompting:
    """kvasir-tiny's tokenizer with this template, and its markers as tokens."""
    directory.mkdir(exist_ok=True)
    tokenizer = json.loads((kvasir_tiny.path() / "tokenizer.json").read_text())
    added = tokenizer["added_tokens"]
    first = 1 + max(*tokenizer["model"]["vocab"].values(), *(each["id"] for each in added))
    known = {each["content"] for each in added}
    markers = [*_MARKERS.findall(source), *(more for marker in _MORE if marker in source for more in _MORE[marker])]
    for number, marker in enumerate(each for each in dict.fromkeys(markers) if each not in known):
        is_special = not marker.startswith("<") or "|" in marker or "｜" in marker
        added.append({**added[-1], "id": first + number, "content": marker, "special": is_special})
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    (directory / "chat_template.jinja").write_text(source)
    (directory / "tokenizer_config.json").write_text((kvasir_tiny.path() / "tokenizer_config.json").read_text())
    wrapped = load_tokenizer(directory)
    return Prompting(wrapped, TokenText.of_tokenizer((directory / "tokenizer.json").read_text(), wrapped.decode))


def wrongs(prompting: Prompting, family: Family) -> Iterator[str]:
    loop = [assistant(reasoning="THOUGHT1", calls=[CALL]), RESULT, assistant("Yes.", "THOUGHT2"), _NEXT]
    text = text_of(prompting, ASKED, *loop, assistant(reasoning="THOUGHT3", calls=[CALL]), RESULT)
    if (kept := tuple(number for number in (1, 2, 3) if f"THOUGHT{number}" in text)) != family.kept:
        yield f"keeps the thoughts {kept}, and {family.kept} were expected"
    for reasoning, content, calls in product(("", "I look\n\nit up."), ("", "Let me\n\nsee."), ([], [CALL], CALLS)):
        if family.writes(reasoning, content, len(calls)):
            whole = assistant(content, reasoning, calls)
            yield from (f"{each}: {whole!r}".replace("\n", " ") for each in _wrong(prompting, family, whole))


def _wrong(prompting: Prompting, family: Family, whole: manifest_pb2.Message) -> Iterator[str]:
    """Of one reply: what is told of it, and the prompts behind it."""
    calls = whole.tool_calls
    prompt, end = text_of(prompting, ASKED), family.call_end if calls else family.end
    full = text_of(prompting, ASKED, whole, asks=False)
    if not full.startswith(prompt):
        yield "its prompt is not what it begins with"
        return
    raw = full.removeprefix(prompt).rstrip("\n").removesuffix(end)
    remembered, sent_back = replied(prompting, raw + end, end)
    for what, found in (("remembered", remembered), ("told", sent_back)):
        if _parts(found) != _parts(whole):
            yield f"{what} as {_parts(found)}"
    following = [RESULT] if calls else [_NEXT]
    nexts = {text_of(prompting, ASKED, each, *following) for each in (remembered, sent_back, whole)}
    if len(nexts) != 1:
        yield "the next prompts differ"
    elif calls and not next(iter(nexts)).startswith(prompt + raw):
        yield "the next prompt does not extend the memory"


def _parts(message: manifest_pb2.Message) -> tuple[object, ...]:
    calls = [(each.name, json.loads(each.arguments_json)) for each in message.tool_calls]
    return message.content, message.reasoning, calls


if __name__ == "__main__":
    sys.exit(main())
