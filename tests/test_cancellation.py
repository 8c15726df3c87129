"""No coroutine of ours swallows a cancel: read from every module's source with `ast`.

A handler that takes CancelledError and goes on leaks: grpc.aio believes the RPC over, and the row decodes for ever. So
every handler around an await that would catch it raises at its end, and nothing suppresses it.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.source_trees import modules, nodes

_CATCHES = ("BaseException", "CancelledError")
Coroutine = ast.AsyncFunctionDef


def swallowed(tree: ast.Module) -> Iterator[int]:
    """Lines where a cancel would end: handlers that do not raise, and suppress()."""
    for function in nodes(tree)[Coroutine]:
        for node in own_nodes(function):
            if isinstance(node, ast.Try | ast.TryStar) and any(map(awaits, node.body)):
                yield from (
                    handler.lineno for handler in node.handlers if catches(handler.type) and not raises(handler)
                )
            if isinstance(node, ast.With) and any(map(suppresses, node.items)) and any(map(awaits, node.body)):
                yield node.lineno


def own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function, without those of functions inside it."""
    for child in ast.iter_child_nodes(function):
        if not isinstance(child, ast.FunctionDef | Coroutine | ast.Lambda):
            yield child
            yield from own_nodes(child)


def awaits(node: ast.AST) -> bool:
    return any(
        isinstance(each, ast.Await | ast.AsyncFor | ast.AsyncWith | ast.Yield) for each in (node, *own_nodes(node))
    )


def catches(kind: ast.expr | None) -> bool:
    if isinstance(kind, ast.Tuple):
        return any(map(catches, kind.elts))
    return kind is None or ast.unparse(kind).rpartition(".")[2] in _CATCHES


def raises(handler: ast.ExceptHandler) -> bool:
    """It ends by raising, whichever way it goes."""
    return isinstance(handler.body[-1], ast.Raise)


def suppresses(item: ast.withitem) -> bool:
    call = item.context_expr
    return isinstance(call, ast.Call) and ast.unparse(call.func).endswith("suppress") and any(map(catches, call.args))


def test_no_handler_swallows_a_cancel() -> None:
    """(LESSONS 28)"""
    found = {path: list(swallowed(tree)) for path, tree in modules().items()}
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "body",
    [
        "try:\n  await x()\n except BaseException:\n  log()",
        "try:\n  await x()\n except:\n  pass",
        "try:\n  async for _ in x():\n   pass\n except (ValueError, asyncio.CancelledError) as error:\n  close(error)",
        "with contextlib.suppress(asyncio.CancelledError):\n  await x()",
        "try:\n  yield 1\n except asyncio.CancelledError:\n  return",
    ],
)
def test_a_handler_that_swallows_is_seen(body: str) -> None:
    assert list(swallowed(ast.parse(f"async def f():\n {body}")))


@pytest.mark.parametrize(
    "body",
    [
        "try:\n  await x()\n except BaseException:\n  log()\n  raise",
        "try:\n  await x()\n except Exception:\n  pass",
        "try:\n  x()\n except BaseException:\n  pass",
        "def g():\n  try:\n   x()\n  except BaseException:\n   pass",
    ],
)
def test_a_handler_that_passes_it_on_is_not(body: str) -> None:
    assert not list(swallowed(ast.parse(f"async def f():\n {body}")))


def test_every_package_is_read() -> None:
    assert {Path(path).parts[0] for path in modules()} == {"inference_svc", "cachestore_svc", "clients"}
