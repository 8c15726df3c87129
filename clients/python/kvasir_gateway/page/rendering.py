"""Templates, and how they write numbers, sizes and times. All texts of agents and people are escaped."""

import shlex
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from kvasir.inference.v1 import inference_pb2 as pb
from starlette.responses import HTMLResponse, Response

_HERE = Path(__file__).parent
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")
_AGES = ((86400, "d"), (3600, "h"), (60, "min"))
# Nothing of another host, no script or style in the page itself, no frame around it, and no copy on a disk.
HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; "
    "object-src 'none'",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "same-origin",
    "x-content-type-options": "nosniff",
    "cache-control": "no-store",
}
_ASSETS = {
    "page.css": "text/css",
    **dict.fromkeys(("page.js", "chat.js", "events.js", "moving.js"), "text/javascript"),
    "icon.svg": "image/svg+xml",
}


def page(template: str, /, status: int = 200, **values: Any) -> HTMLResponse:
    """A template's page, with the headers that keep it to itself."""
    return HTMLResponse(_TEMPLATES.get_template(template).render(**values), status, HEADERS)


def asset(name: str) -> Response | None:
    """A file that pages name; None if there is no such file."""
    if name not in _ASSETS:
        return None
    headers = {**HEADERS, "cache-control": "no-cache"}
    return Response((_HERE / "assets" / name).read_bytes(), 200, headers, _ASSETS[name])


def link(path: str, **query: object) -> str:
    """A path of this site with a query; what is empty is left out."""
    given = {name: value for name, value in query.items() if value not in ("", None)}
    return f"{path}?{urlencode(given)}" if given else path


def size(count: int) -> str:
    """12345678 → "11.8 MiB"."""
    value, unit = float(count), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.{0 if unit == 0 or value >= 100 else 1}f} {_UNITS[unit]}"


def number(count: int) -> str:
    return f"{count:,}"


def age(seconds: float) -> str:
    """The largest unit of a time, which is enough for a look: "3 min"."""
    return next((f"{seconds / unit:.0f} {name}" for unit, name in _AGES if seconds >= unit), f"{max(seconds, 0):.0f} s")


def lasted(duration: Duration) -> str:
    return age(duration.ToMilliseconds() / 1000)


def moment(at: Timestamp | str, now_s: float) -> Mapping[str, str]:
    """A time for programs, and how long before `now_s` (Unix seconds) it was. Commands write it as ISO 8601."""
    when = datetime.fromisoformat(at) if isinstance(at, str) else at.ToDatetime(tzinfo=UTC)
    return {"exact": when.isoformat(timespec="seconds"), "ago": f"{age(now_s - when.timestamp())} ago"}


def reuse_words(source: int, cached: int, prompt: int, reason: str) -> str:
    """How much of a prompt came from memory, and why not more."""
    name = pb.CacheSource.Name(source).removeprefix("CACHE_SOURCE_").lower()  # type: ignore[arg-type]
    return f"{cached:,} of {prompt:,} tokens from memory ({name}{f': {reason}' if reason else ''})"


def difference_words(place: pb.Difference) -> str:
    """Where a prompt parted from the memory, with both texts."""
    where = f"message {place.message + 1} ({place.role})" if place.HasField("message") else place.role or "the text"
    what = f", its {place.what}" if place.what else ""
    helps = f" The rule {', '.join(place.rules)} helps." if place.rules else ""
    return (
        f"The prompt parts from the memory at {where}{what}: “{place.given}” in place of “{place.remembered}”.{helps}"
    )


def words(name: str) -> str:
    """new_agent → "new agent"."""
    return name.replace("_", " ").lower()


def last_word(path: str) -> str:
    """kvasir.cachestore.v1.AgentService/DeleteAgent → "DeleteAgent"."""
    return path.rpartition("/")[2]


_TEMPLATES = Environment(
    loader=FileSystemLoader(_HERE / "templates"),
    autoescape=True,
    undefined=StrictUndefined,
    auto_reload=False,  # else each page would look at its files
    trim_blocks=True,
    lstrip_blocks=True,
)
_TEMPLATES.filters.update(size=size, number=number, lasted=lasted, moment=moment, words=words, last_word=last_word)
_TEMPLATES.filters.update(quoted=shlex.quote)  # a word of a command for a terminal
_TEMPLATES.globals.update(link=link, reuse_words=reuse_words, difference_words=difference_words)
