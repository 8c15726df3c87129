"""YAML as plain data that knows its lines: what JSON has, no key twice, and no aliases, which can spell gigabytes."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import yaml
from kvasir.errors import InvalidArgument

MAX_FILE_CHARACTERS = 1 << 20
MAX_PROBLEMS = 20
_MAX_DEPTH = 16
_MAX_PARTS = 60_000  # PyYAML takes seconds for more
_MAX_INT_BITS = 63
_INT, _FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
_PLAIN = (str, int, float, bool, type(None))

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a file. `line` counts from 1; `name` is the field, such as phases[0].agents[1]."""

    line: int
    name: str
    text: str


class ScenarioInvalid(InvalidArgument):
    """A scenario that cannot be run. `problems` are all that were found, by line."""

    reason = "SCENARIO_INVALID"

    def __init__(self, source: str, problems: list[Problem]) -> None:
        self.source = source
        self.problems = sorted(problems, key=lambda problem: problem.line)[:MAX_PROBLEMS]
        super().__init__("; ".join(self.lines()), field=self.problems[0].name)

    def lines(self) -> list[str]:
        """Each problem as FILE:LINE: FIELD: what was expected."""
        shown = []
        for problem in self.problems:
            name = f"{problem.name}: " if problem.name else ""
            shown.append(f"{self.source}:{problem.line}: {name}{problem.text}")
        return shown


@dataclass
class Lines:
    """The line of every field of a file."""

    of_path: dict[Path, int] = field(default_factory=dict)

    def problem(self, path: Path, text: str) -> Problem:
        """At the field's own line, or its nearest parent's when the field is missing."""
        known = path
        while known and known not in self.of_path:
            known = known[:-1]
        return Problem(self.of_path.get(known, 1), spelled(path), text)


def spelled(path: Path) -> str:
    """A path as people write it: phases[0].agents[1]."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def read(text: str, source: str) -> tuple[object, Lines]:
    """The file's data and lines. Raises ScenarioInvalid."""
    if len(text) > MAX_FILE_CHARACTERS:
        said = f"expected at most {MAX_FILE_CHARACTERS} characters, got {len(text)}"
        raise ScenarioInvalid(source, [Problem(1, "", said)])
    if sum(map(text.count, "\n,:")) > _MAX_PARTS:
        raise ScenarioInvalid(source, [Problem(1, "", f"expected at most {_MAX_PARTS} lines, pairs and items in all")])
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = error.problem or error.context or "not understood"
        raise ScenarioInvalid(source, [Problem(mark.line + 1 if mark else 1, "", f"not YAML: {what}")]) from None
    except (yaml.YAMLError, RecursionError) as error:
        said = f"not YAML: {' '.join(str(error).split())[:200]}"
        raise ScenarioInvalid(source, [Problem(1, "", said)]) from None
    reader = _Reader()
    data = None if node is None else reader.value(node, ())
    if reader.problems:
        raise ScenarioInvalid(source, reader.problems)
    return data, reader.lines


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # it has no types
    """PyYAML's, without the numbers to base 60: a long one keeps it busy for minutes."""


_loads_of = yaml.SafeLoader.yaml_implicit_resolvers
_Loader.yaml_implicit_resolvers = {
    first: [pair for pair in pairs if pair[0] not in (_INT, _FLOAT)] for first, pairs in _loads_of.items()
}
_Loader.add_implicit_resolver(_INT, re.compile(r"[-+]?(?:0b[01]+|0x[0-9a-fA-F]+|0|[1-9][0-9]*)$"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    _FLOAT,
    re.compile(r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?$|[-+]?\.(?:inf|Inf|INF)$|\.(?:nan|NaN|NAN)$"),
    list("-+0123456789."),
)


class _Reader:
    """Turns YAML nodes into plain data, and notes lines and problems on its way."""

    def __init__(self) -> None:
        self.lines = Lines()
        self.problems: list[Problem] = []
        self._scalars = _Loader("")
        self._met: set[int] = set()

    def value(self, node: yaml.Node, path: Path) -> object:
        self.lines.of_path.setdefault(path, node.start_mark.line + 1)
        if id(node) in self._met:
            self._refuse(node, path, "expected no alias (*name): write it out")
            return None
        self._met.add(id(node))
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path)
        if len(path) > _MAX_DEPTH:
            self._refuse(node, path, f"expected at most {_MAX_DEPTH} levels")
            return None
        if isinstance(node, yaml.MappingNode):
            return dict(self._pairs(node, path))
        return [self.value(each, (*path, index)) for index, each in enumerate(node.value)]

    def _pairs(self, node: yaml.MappingNode, path: Path) -> Iterator[tuple[str, object]]:
        first_lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            key = self._scalar(key_node, path) if isinstance(key_node, yaml.ScalarNode) else None
            if not isinstance(key, str):
                written = getattr(key_node, "value", key)
                self._refuse(key_node, path, f"expected a text as key, got {written!r}; put it in quotes")
            elif key in first_lines:
                self._refuse(key_node, (*path, key), f"stands twice, first in line {first_lines[key]}")
            else:
                first_lines[key] = key_node.start_mark.line + 1
                self.lines.of_path[*path, key] = first_lines[key]
                yield key, self.value(value_node, (*path, key))

    def _scalar(self, node: yaml.ScalarNode, path: Path) -> object:
        try:
            value = self._scalars.construct_object(node)
        except (yaml.YAMLError, ValueError, OverflowError):
            value = object()
        is_huge = isinstance(value, int) and value.bit_length() > _MAX_INT_BITS  # Python refuses to spell it
        if is_huge or not isinstance(value, _PLAIN):
            self._refuse(node, path, f"expected a text, number or boolean, got {node.value[:40]!r}; quote it")
            return None
        return value

    def _refuse(self, node: yaml.Node, path: Path, text: str) -> None:
        self.problems.append(Problem(node.start_mark.line + 1, spelled(path), text))
