"""The operations of the gateway, from its OpenAPI document, and its refusals, from the table of errors."""

from typing import Any

from kvasir.status import ANSWERS
from kvasir_gateway.openapi import document

Json = dict[str, Any]


def with_references(page: str) -> str:
    """The page with both, where it has a line for each."""
    for line, made in (("!operations", operations), ("!errors", errors)):
        if f"\n{line}\n" in page:
            page = page.replace(f"\n{line}\n", f"\n{made()}\n")
    return page


def errors() -> str:
    """A row for each kind of refusal."""
    meanings = {kind: (kind.__doc__ or "").partition(" gRPC: ")[0] for kind in ANSWERS}
    rows = (
        f"| {answer.http_status} | {answer.code.name} | `{kind.__name__}` | {meanings[kind]} |"
        for kind, answer in ANSWERS.items()
    )
    return "\n".join(("| HTTP | gRPC | Python, `kvasir.errors` | |", "|---|---|---|---|", *rows))


def operations() -> str:
    """Each operation with the fields of its body. `/openapi.json` of a gateway has the whole schemas."""
    found = document("")
    schemas = found["components"]["schemas"]
    lines = list[str]()
    for path, methods in found["paths"].items():
        for method, operation in methods.items():
            lines += [f"### {method.upper()} {path}", "", f"{operation['summary']}.", ""]
            lines += _parameters(operation)
            if body := operation.get("requestBody"):
                name = body["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
                lines += _fields(schemas[name])
    return "\n".join(lines)


def _parameters(operation: Json) -> list[str]:
    named = [f"`{each['name']}` ({each['in']})" for each in operation.get("parameters", ())]
    return [f"Parameters: {', '.join(named)}.", ""] if named else []


def _fields(schema: Json) -> list[str]:
    required = schema.get("required", ())
    rows = [
        f"| `{name}` | {_type(field)} | {'required' if name in required else ''} |"
        for name, field in schema["properties"].items()
    ]
    return ["| field | type | |", "|---|---|---|", *rows, ""]


def _type(field: Json) -> str:
    if reference := field.get("$ref"):
        return str(reference).rpartition("/")[2]
    if options := field.get("anyOf") or field.get("oneOf"):
        return " or ".join(dict.fromkeys(_type(each) for each in options if each != {"type": "null"}))
    if values := field.get("enum"):
        return ", ".join(f"`{value}`" for value in values)
    if "const" in field:
        return f"`{field['const']}`"
    if field.get("type") == "array":
        return f"list of {_type(field.get('items', {}))}"
    return str(field.get("type", "any"))
