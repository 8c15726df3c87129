"""A model whose chat template prints the time to the millisecond: between any two turns it is midnight."""

import shutil
from datetime import datetime, timedelta
from pathlib import Path

FORM = "%d %B %Y %H:%M:%S.%f"
_ASKED = "{{ strftime_now('" + FORM + "') }}"


def dated(model: Path, directory: Path, date: str = _ASKED) -> Path:
    """The model with a template that begins with a date; `date` is Jinja, or a date that never changes."""
    shutil.copytree(model, directory)
    template = directory / "chat_template.jinja"
    begin = "{{- '<|im_start|>system\\nToday is ' }}" + date + "{{- '.<|im_end|>\\n' }}"
    template.write_text(begin + template.read_text())
    return directory


def date_of(time_ms: int) -> str:
    """What the template prints at a time of a manifest."""
    return (datetime(1970, 1, 1) + timedelta(milliseconds=time_ms)).strftime(FORM)
