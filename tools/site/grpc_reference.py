"""The reference of the gRPC contract: a page for each .proto, made of its comments."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from google.protobuf import descriptor_pb2 as pb

ROOT = Path(__file__).parents[2]
_TYPES = {
    number: name.removeprefix("TYPE_").lower()
    for name, number in pb.FieldDescriptorProto.Type.items()
    if name not in ("TYPE_MESSAGE", "TYPE_ENUM", "TYPE_GROUP")
}
# Numbers of fields in descriptor.proto, of which a location's path is made.
_MESSAGES, _ENUMS, _SERVICES, _METHODS, _FIELDS, _NESTED, _NESTED_ENUMS, _VALUES = 4, 5, 6, 2, 2, 3, 4, 2
_PACKAGE, _SYNTAX = 2, 12
Path_ = tuple[int, ...]


def pages() -> dict[str, str]:
    """By the page's name, as grpc/inference.md."""
    files = [file for file in _descriptors() if file.package.startswith("kvasir.")]
    homes = {name: page_of(file) for file in files for name in _names(file)}
    return {page_of(file): _Page(file, homes).text() for file in files}


def page_of(file: pb.FileDescriptorProto) -> str:
    return f"grpc/{Path(file.name).stem}.md"


def _descriptors() -> Sequence[pb.FileDescriptorProto]:
    buf = Path(sys.executable).with_name("buf")
    command = (str(buf) if buf.exists() else "buf", "build", "proto", "-o", "-")
    built = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, check=True)
    return pb.FileDescriptorSet.FromString(built.stdout).file


def _names(file: pb.FileDescriptorProto) -> Iterator[str]:
    for kind in (file.service, file.message_type, file.enum_type):
        yield from (f".{file.package}.{each.name}" for each in kind)
    yield from (f".{file.package}.{each.name}.{inner.name}" for each in file.message_type for inner in each.nested_type)


class _Page:
    """One file of the contract, as Markdown."""

    def __init__(self, file: pb.FileDescriptorProto, homes: dict[str, str]) -> None:
        self._file, self._homes = file, homes
        self._comments = {
            tuple(each.path): _prose(each.leading_comments or each.trailing_comments)
            for each in file.source_code_info.location
        }
        self._lines = list[str]()

    def text(self) -> str:
        file, lines = self._file, self._lines
        lines += [f"# {file.package}: {Path(file.name).name}", ""]
        lines += [self._comments.get((_SYNTAX,), "") or self._comments.get((_PACKAGE,), ""), ""]
        for index, service in enumerate(file.service):
            self._service(service, (_SERVICES, index))
        for index, message in enumerate(file.message_type):
            self._message(message, (_MESSAGES, index))
        for index, enum in enumerate(file.enum_type):
            self._enum(enum, (_ENUMS, index))
        return "\n".join(lines) + "\n"

    def _service(self, service: pb.ServiceDescriptorProto, at: Path_) -> None:
        self._head(service.name, at)
        for index, method in enumerate(service.method):
            given = ("stream " if method.client_streaming else "") + self._link(method.input_type)
            answer = ("stream " if method.server_streaming else "") + self._link(method.output_type)
            self._lines += [f"### {method.name} {{ #{service.name}.{method.name} }}", "", f"{given} → {answer}", ""]
            comment = self._comments.get((*at, _METHODS, index), "")
            self._lines += [comment.replace(" Errors: ", "\n\n**Errors:** "), ""]

    def _message(self, message: pb.DescriptorProto, at: Path_, outer: str = "") -> None:
        if message.options.map_entry:
            return
        self._head(outer + message.name, at)
        if message.field:
            self._lines += ["| field | type | |", "|---|---|---|"]
        for index, each in enumerate(message.field):
            is_choice = each.HasField("oneof_index") and not each.proto3_optional
            group = f"one of *{message.oneof_decl[each.oneof_index].name}*. " if is_choice else ""
            said = group + self._comments.get((*at, _FIELDS, index), "")
            self._lines.append(f"| `{each.name}` = {each.number} | {self._type(each, message)} | {_cell(said)} |")
        self._lines.append("")
        for index, inner in enumerate(message.nested_type):
            self._message(inner, (*at, _NESTED, index), f"{outer}{message.name}.")
        for index, enum in enumerate(message.enum_type):
            self._enum(enum, (*at, _NESTED_ENUMS, index))

    def _enum(self, enum: pb.EnumDescriptorProto, at: Path_) -> None:
        self._head(enum.name, at)
        self._lines += ["| value | |", "|---|---|"]
        for index, value in enumerate(enum.value):
            said = _cell(self._comments.get((*at, _VALUES, index), ""))
            self._lines.append(f"| `{value.name}` = {value.number} | {said} |")
        self._lines.append("")

    def _head(self, name: str, at: Path_) -> None:
        self._lines += [f"## {name} {{ #{name} }}", "", self._comments.get(at, ""), ""]

    def _type(self, each: pb.FieldDescriptorProto, message: pb.DescriptorProto) -> str:
        entry = next((inner for inner in message.nested_type if each.type_name.endswith(f".{inner.name}")), None)
        if entry is not None and entry.options.map_entry:
            key, value = entry.field
            return f"map of {self._type(key, entry)} to {self._type(value, entry)}"
        name = _TYPES.get(each.type) or self._link(each.type_name)
        if each.label == pb.FieldDescriptorProto.LABEL_REPEATED:
            return f"repeated {name}"
        return f"optional {name}" if each.proto3_optional else name

    def _link(self, full_name: str) -> str:
        short = full_name.removeprefix(f".{self._file.package}.").removeprefix(".")
        home = self._homes.get(full_name)
        if home is None:  # of Google's own files
            return f"`{short}`"
        anchor = short.rpartition(".v1.")[2]
        return f"[{anchor}]({'' if home == page_of(self._file) else Path(home).name}#{anchor})"


def _prose(comment: str) -> str:
    """A comment as one paragraph after another, in which only code is Markdown."""
    parts = re.split(r"(`[^`\n]+`)", comment)
    parts[::2] = (re.sub(r"([\\`*_{}\[\]<>#])", r"\\\1", part) for part in parts[::2])
    return "\n\n".join(" ".join(part.split()) for part in "".join(parts).split("\n\n")).strip()


def _cell(text: str) -> str:
    return text.replace("\n\n", "<br>").replace("|", "\\|")
