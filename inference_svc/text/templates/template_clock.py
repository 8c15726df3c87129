"""The time for a template that reads the clock: the memory's, else the turn's own, by the wall clock without zone."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime, timedelta

ASKS_TIME = "strftime_now"  # the function of chat templates

_EPOCH = datetime(1970, 1, 1)
_MILLISECOND = timedelta(milliseconds=1)


def wall_clock_ms(unix_ms: int) -> int:
    """What a clock on this machine's wall shows at a Unix time."""
    return (datetime.fromtimestamp(unix_ms / 1000) - _EPOCH) // _MILLISECOND


@dataclass(slots=True)
class TemplateClock:
    """The time of one turn, in milliseconds of the wall clock since 1970-01-01 00:00."""

    remembered_ms: int = 0  # the time that the conversation's memory has; 0: none
    now_ms: int = 0
    told_ms: int = 0  # the time that the template has read; 0: none
    has_kept: bool = False  # the template would have printed another text now

    def strftime(self, form: str) -> str:
        """The text for a template. Raises ValueError for a form that the platform does not know."""
        self.told_ms = self.remembered_ms or self.now_ms
        text, now = ((_EPOCH + time_ms * _MILLISECOND).strftime(form) for time_ms in (self.told_ms, self.now_ms))
        self.has_kept |= text != now
        return text


_TELLING: ContextVar[TemplateClock | None] = ContextVar("telling", default=None)


@contextmanager
def telling(clock: TemplateClock) -> Iterator[None]:
    """Templates that are rendered meanwhile, in this thread, read the time of `clock`."""
    token = _TELLING.set(clock)
    try:
        yield
    finally:
        _TELLING.reset(token)


def tell_time(template: str) -> None:
    """From now on the template's `strftime_now` gives the time of `telling`: a text, as the library's own does."""
    from transformers.utils import chat_template_utils  # late: it takes a second, which only these templates need

    compiled = chat_template_utils._compile_jinja_template(template)
    librarys = compiled.environment.globals[ASKS_TIME]

    def strftime_now(form: str) -> str:
        clock = _TELLING.get()
        return str(librarys(form)) if clock is None else clock.strftime(form)

    compiled.globals[ASKS_TIME] = strftime_now
