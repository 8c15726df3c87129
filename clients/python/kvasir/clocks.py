"""Dates and clocks in texts: two texts that differ in nothing else mean the same at another time."""

import re

_MONTH = (
    r"(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|Sept?(?:ember)?|Oct(?:ober)?"
    r"|Nov(?:ember)?|Dec(?:ember)?)\.?"
)
_WEEKDAY = r"(?:Mon|Tues?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?\.?"
_DAY = r"\d{1,2}(?:st|nd|rd|th)?"
_YEAR = r"(?:19|20)\d\d"
_DATE = re.compile(
    rf"(?<![\w.])(?:{_WEEKDAY},?\ )?(?:"
    rf"{_YEAR}[-/.]\d{{1,2}}[-/.]\d{{1,2}}(?!\d)"
    rf"|\d{{1,2}}([-/.])\d{{1,2}}\1{_YEAR}(?!\d)"
    rf"|{_YEAR}年\d{{1,2}}月\d{{1,2}}日"
    rf"|{_MONTH}\ {_DAY}(?:,?\ {_YEAR})?(?!\w)"
    rf"|{_DAY}\.?\ (?:of\ )?{_MONTH}(?:,?\ {_YEAR})?(?!\w)"
    r")|(?<!\w)(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day(?!\w)",
    re.IGNORECASE,
)
_CLOCK = re.compile(
    r"(?<![\d:.])\d{1,2}:\d\d(?::\d\d(?:[.,]\d{1,9})?)?(?![\d:])(?:\ ?[ap]\.?m\b\.?)?"
    r"(?:\ ?(?:Z\b|UTC\b|GMT\b|[+-]\d\d:?\d\d(?!\d)))?"
    r"|(?<![\d.])1[6-9]\d{8}(?:\d{3})?(?:\.\d{1,9})?(?!\d)",
    re.IGNORECASE,
)
_DIGIT = re.compile(r"\d")
_MASK = "\0"


def without_dates(text: str) -> str:
    """The text with one same character in place of each date."""
    return "".join(map(_without_dates, text.splitlines(keepends=True)))


def _without_dates(line: str) -> str:
    """Most lines have none: they need not be searched for the many forms."""
    return _DATE.sub(_MASK, line) if _DIGIT.search(line) or "day" in line.lower() else line


def without_clocks(text: str) -> str:
    """The same for times of a day, and for Unix times."""
    return _CLOCK.sub(_MASK, text)


def without_times(text: str) -> str:
    """Without both."""
    return without_clocks(without_dates(text))
