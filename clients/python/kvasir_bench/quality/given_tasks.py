"""The user's own tasks as sheets for one model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvasir.errors import InvalidArgument

from inference_svc.model.quality.material import Sheet, task_sheet
from inference_svc.model.quality.tasks import Task


def given_sheets(file: Path, tasks: Sequence[Task], tokenizer: Any, context_tokens: int) -> list[Sheet]:
    """Raises InvalidArgument, with the task's number, for one that the model's template or context cannot take."""
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
