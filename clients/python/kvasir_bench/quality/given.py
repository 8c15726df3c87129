"""Material of the user's own: tasks, or a text, cut into windows of equal length that are spread over all of it."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvasir.errors import InvalidArgument, NotFound

from inference_svc.model.quality.material import Sheet, task_sheet
from inference_svc.model.quality.tasks import Task

WINDOWS = 16
SHORTEST = 64  # tokens of a window
LONGEST = 1024
MOST_BYTES = 16 << 20
_EXPECTED = f"expected UTF-8 of at least {WINDOWS * SHORTEST:,} tokens"


def read_text(file: Path) -> str:
    """The file's characters. Raises NotFound, InvalidArgument."""
    try:
        with file.open("rb") as opened:
            data = opened.read(MOST_BYTES + 1)
    except OSError as error:
        raise NotFound.of("text", f"{file} cannot be read ({error.strerror}); {_EXPECTED}") from None
    if len(data) > MOST_BYTES:
        raise InvalidArgument.of(
            "text", f"{file} is larger than {MOST_BYTES >> 20} MiB; {_EXPECTED}, and less than that"
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidArgument.of("text", f"{file} is not UTF-8 at byte {error.start}; {_EXPECTED}") from None


def windows_of(file: Path, text: str, tokenizer: Any, longest: int) -> list[Sheet]:
    """16 windows of at most `longest` tokens, each with the text's own first tokens. Raises InvalidArgument."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    needed = WINDOWS * SHORTEST
    if len(ids) < needed:
        about = f", about {math.ceil(needed * len(text) / len(ids)):,} characters of such text" if ids else ""
        raise InvalidArgument.of("text", f"{file} has {len(ids):,} tokens of this model; {_EXPECTED}{about}")
    begin = tokenizer.bos_token_id
    beginning = (begin,) if begin is not None and tokenizer.encode("")[:1] == [begin] else ()
    stride = len(ids) // WINDOWS
    length = min(stride, longest)
    return [
        Sheet((*beginning, *ids[start : start + length]), scored_from=len(beginning) + 1)
        for start in range(0, WINDOWS * stride, stride)
    ]


def given_sheets(file: Path, tasks: Sequence[Task], tokenizer: Any, context_tokens: int) -> list[Sheet]:
    """Tasks for one model. Raises InvalidArgument, with the number, for one that template or context cannot take."""
    sheets = []
    for number, task in enumerate(tasks, 1):
        where = f"tasks: {file}, task {number} ({task.name})"
        try:
            sheet = task_sheet(task, tokenizer, scores_text=True)
        except InvalidArgument as error:
            raise InvalidArgument(f"{where}: {error.message}", field=error.field) from None
        if len(sheet.ids) > context_tokens:
            raise InvalidArgument(
                f"{where}: {len(sheet.ids):,} tokens with its answer; the model's context has {context_tokens:,}",
                field="tasks",
            )
        sheets.append(sheet)
    return sheets
