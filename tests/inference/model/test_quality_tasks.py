"""Tasks for the gate: the file format, the tasks that ship, their tokens, and how they are judged."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kvasir.errors import InvalidArgument, NotFound
from kvasir_bench.quality.given import given_sheets

from inference_svc.kv.policy import tried_by_auto
from inference_svc.model.quality.exam import Subject
from inference_svc.model.quality.findings import Findings, Share, judged
from inference_svc.model.quality.material import task_sheet
from inference_svc.model.quality.tasks import Task, read_tasks, shipped_tasks

GOOD = {"task": "dates", "prompt": "Q: When? A:", "answer": " On 4 May."}
USER = {"role": "user", "content": "When?"}


def file_of(tmp_path: Path, *lines: object) -> Path:
    file = tmp_path / "tasks.jsonl"
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return file


def test_a_file_has_a_task_in_each_line_that_is_not_empty(tmp_path: Path) -> None:
    talk = {"task": "talk", "messages": [USER], "tools": [{"type": "function"}], "answer": "Now."}
    first, second = read_tasks(file_of(tmp_path, GOOD, "", talk, " "))
    assert first == Task("dates", " On 4 May.", "Q: When? A:")
    assert (second.name, second.prompt, second.messages, len(second.tools)) == ("talk", "", (USER,), 1)


@pytest.mark.parametrize(
    ("line", "field", "expected"),
    [
        ("{", "tasks", "expected JSON"),
        ("[1]", "tasks", "expected a JSON object"),
        (GOOD | {"weight": 2}, "tasks.weight", "expected only"),
        (GOOD | {"task": "Dates!"}, "tasks.task", "expected a name"),
        (GOOD | {"task": None}, "tasks.task", "expected a text"),
        ({"task": "dates", "prompt": "When?"}, "tasks.answer", "expected a text"),
        (GOOD | {"answer": 4}, "tasks.answer", "expected a text"),
        ({"task": "dates", "answer": "4"}, "tasks.prompt", "a prompt or messages"),
        (GOOD | {"messages": [USER]}, "tasks.prompt", "not both"),
        (GOOD | {"tools": [{}]}, "tasks.tools", "belong to messages"),
        ({"task": "dates", "answer": "4", "messages": USER}, "tasks.messages", "a list of objects"),
        ({"task": "d", "answer": "4", "messages": [USER, {"role": "dog"}]}, "tasks.messages[1].role", "one of system"),
        ({"task": "d", "answer": "4", "messages": [{"role": "user"}]}, "tasks.messages[0].content", "a text"),
    ],
)
def test_a_bad_line_is_refused_with_its_number_and_field(
    line: object, field: str, expected: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidArgument, match=f"line 3.*{expected}") as refused:
        read_tasks(file_of(tmp_path, GOOD, "", line))
    assert refused.value.field == field


def test_a_file_without_tasks_or_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="has no task"):
        read_tasks(file_of(tmp_path, "", " "))
    (tmp_path / "latin").write_bytes(json.dumps(GOOD, ensure_ascii=False).replace("May", "M\xe4rz").encode("latin-1"))
    with pytest.raises(InvalidArgument, match="line 1: expected JSON in UTF-8"):
        read_tasks(tmp_path / "latin")
    with pytest.raises(NotFound, match="cannot be read"):
        read_tasks(tmp_path / "missing")


# The tasks that ship are right.


def calculated(prompt: str) -> str:
    steps = re.findall(r"Steps: (.+)", prompt)[-1]
    value, written = int(re.match(r"Start with (\d+)", steps)[1]), ""  # type: ignore[index]
    for verb, number in re.findall(r"(Add|Multiply by|Subtract) (\d+)", steps):
        sign = {"Add": "+", "Multiply by": "*", "Subtract": "-"}[verb]
        result = {"+": value + int(number), "*": value * int(number), "-": value - int(number)}[sign]
        written += f" {value} {sign} {number} = {result}."
        value = result
    return f"{written} Result: {value}\n"


def test_the_shipped_arithmetic_is_right() -> None:
    chains = [task for task in shipped_tasks() if task.name == "chained_arithmetic"]
    assert len(chains) == len({task.prompt for task in chains}) == 8
    for task in chains:
        assert task.answer == calculated(task.prompt)


def words_of(text: str) -> set[str]:
    return set(re.findall(r"\w+|[<>]", text))


def test_the_shipped_edits_change_what_their_edit_names_and_nothing_else() -> None:
    edits = [task for task in shipped_tasks() if task.name == "code_edits"]
    assert len(edits) == len({task.prompt for task in edits}) == 8
    for task in edits:
        code, request = re.findall(r"Code:\n```\n(.+?)```\nEdit: (.+?)\n", task.prompt, re.DOTALL)[-1]
        before, after = code.splitlines(), task.answer.removesuffix("```\n").splitlines()
        changed = [pair for pair in zip(before, after, strict=True) if pair[0] != pair[1]]
        assert changed, request
        for old, new in changed:
            assert words_of(new) - words_of(old) <= {*words_of(request), "<"}, request


def test_the_shipped_calls_have_arguments_from_the_request_and_the_notes() -> None:
    calls = [task for task in shipped_tasks() if task.name == "tool_arguments"]
    assert len(calls) == len({task.prompt for task in calls}) == 8
    for task in calls:
        call, request = json.loads(task.answer), re.findall(r"Request: (.+)", task.prompt)[-1]
        assert call["name"] in task.prompt
        notes = task.prompt.partition("Notes:\n")[2].partition("\n\n")[0]
        for value in call["arguments"].values():
            assert str(value) in request or str(value) in notes
        assert any(str(value) in notes for value in call["arguments"].values())


# Their tokens.


def letters(*, merges: str = "") -> SimpleNamespace:
    """A token for each character, and one for `merges`; a template that writes roles in brackets."""

    def encode(text: str, add_special_tokens: bool = True) -> list[int]:
        words = re.findall(f"{re.escape(merges)}|." if merges else ".", text, re.DOTALL)
        return [*([1] if add_special_tokens else []), *(2 if len(word) > 1 else ord(word) for word in words)]

    def apply_chat_template(messages: list[dict[str, Any]], **_: Any) -> list[int]:
        if messages[0]["role"] == "system":
            raise ValueError("no system message")
        return [0, *(ord(each["role"][0]) for each in messages)]

    return SimpleNamespace(encode=encode, apply_chat_template=apply_chat_template, eos_token_id=9)


def test_the_scored_part_is_the_answer() -> None:
    sheet = task_sheet(Task("t", " ab", "x:"), letters())
    assert (sheet.ids[sheet.scored_from :], sheet.task) == ((32, 97, 98), "t")
    merged = task_sheet(Task("t", " ab", "x:"), letters(merges=": "))
    assert merged.ids[merged.scored_from :] == (2, 97, 98)
    chat = task_sheet(Task("t", "ab", messages=(USER,)), letters())
    assert (chat.ids, chat.scored_from) == ((0, ord("u"), 97, 98, 9), 2)


def test_a_task_that_the_model_cannot_take_is_refused_with_its_number() -> None:
    tasks = [Task("t", "ab", "x"), Task("t", "ab", messages=({"role": "system", "content": ""},))]
    with pytest.raises(InvalidArgument, match=r"task 2 \(t\): the chat template raises ValueError"):
        given_sheets(Path("mine"), tasks, letters(), 100)
    with pytest.raises(InvalidArgument, match=r"task 1 \(t\): 4 tokens with its answer; .* has 3"):
        given_sheets(Path("mine"), tasks, letters(), 3)


def test_a_model_whose_tokenizer_cannot_write_a_task_is_examined_without_it() -> None:
    one_word = SimpleNamespace(encode=lambda text: [1] if text.startswith("Make") else [1, *text.encode()])
    sheets = Subject(SimpleNamespace(), one_word, lambda: None, 1 << 16).sheets_of(shipped_tasks())  # type: ignore[arg-type]
    assert {sheet.task for sheet in sheets} == {"chained_arithmetic", "tool_arguments"}


# How they are judged.


def found(name: str, **right: int) -> Findings:
    """Findings of a model that repeats nothing, with so many right tasks of 10 each."""
    return Findings(name, 1, positions=100, agreed=100, tasks={task: Share(count, 10) for task, count in right.items()})


def test_a_lost_task_fails_a_rung_that_agrees_otherwise() -> None:
    exact = found("exact", chained_arithmetic=8, code_edits=9)
    assert judged(found("q4", chained_arithmetic=8, code_edits=9), exact).passes
    verdict = judged(found("q4", chained_arithmetic=7, code_edits=9), exact)
    assert (verdict.passes, verdict.why) == (False, "chained arithmetic 7 of 10, exact KV 8")


def test_a_task_that_exact_kv_does_not_do_is_not_judged() -> None:
    exact = found("exact", chained_arithmetic=4, code_edits=9)
    verdict = judged(found("q4", chained_arithmetic=0, code_edits=9), exact)
    assert verdict.passes
    assert "chained" not in verdict.why


def test_auto_does_not_try_plain_keys_where_rotated_keys_have_the_same_size() -> None:
    assert tried_by_auto(["q4", "q4-rotated", "k8v4", "q8", "fp"]) == ["q4-rotated", "k8v4", "q8", "fp"]
    assert tried_by_auto(["q4", "k8v4", "q8", "fp"]) == ["q4", "k8v4", "q8", "fp"]
