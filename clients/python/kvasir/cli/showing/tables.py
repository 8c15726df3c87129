"""Tables of results: names above columns, or pairs of a name and a value; no lines."""

from collections.abc import Collection, Iterable

from rich.table import Column, Table


def table(
    columns: Iterable[str], rows: Iterable[Iterable[object]], *, numbers: Collection[str] = (), whole: str = ""
) -> Table:
    """`numbers`: the columns that are numbers, set right. `whole`: the one whose cells are never cut."""
    heads = [
        Column(each, justify="right" if each in numbers else "left", no_wrap=bool(each) and each == whole)
        for each in columns
    ]
    made = Table(*heads, box=None, pad_edge=False)
    for row in rows:
        made.add_row(*map(str, row))
    return made


def pairs(rows: Iterable[tuple[str, object]], justify: str = "right") -> Table:
    """Names and values, without a head."""
    made = Table("", Column(justify=justify), box=None, pad_edge=False, show_header=False)  # type: ignore[arg-type]
    for name, value in rows:
        made.add_row(name, str(value))
    return made
