"""transformers without a look through all of its models: nothing is missing, and a tokenizer loads without one."""

import subprocess
import sys
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import pytest
from kvasir.server.lean_imports import hidden

from inference_svc import lean_transformers
from inference_svc.model import kvasir_tiny

COUNTING = """
import sys
opened = set()
def hook(event, arguments):
    if event == "open" and "/transformers/models/" in str(arguments[0]):
        opened.add(str(arguments[0]).split("/transformers/models/")[1].split("/")[0])
sys.addaudithook(hook)
import inference_svc
from transformers import AutoTokenizer
AutoTokenizer.from_pretrained(sys.argv[1])
print(len(opened))
"""


EVERY_NAME = """
import inference_svc, transformers
from pathlib import Path
from transformers.utils import import_utils

everything = import_utils.create_import_structure_from_path(Path(transformers.__file__).parent / "models")
found = import_utils.spread_import_structure(everything)
names = {name for modules in found.values() for names in modules.values() for name in names}
assert len(names) > 1000
assert names <= set(dir(transformers)), sorted(names - set(dir(transformers)))[:5]
assert transformers.LlamaTokenizerFast.__name__.startswith("LlamaTokenizer")
assert transformers.models.qwen2.Qwen2Config.model_type == "qwen2"
assert not hasattr(transformers, "NoSuchName")
"""


@pytest.mark.long(3)
def test_every_name_is_there_once_it_is_requested() -> None:
    """In a process of its own: another test may have imported the library first."""
    subprocess.run([sys.executable, "-c", EVERY_NAME], check=True)


@pytest.mark.long(2)
def test_a_tokenizer_loads_without_a_look_at_other_models() -> None:
    argv = [sys.executable, "-c", COUNTING, str(kvasir_tiny.path())]
    answer = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert int(answer.stdout) < 30


def test_a_part_of_a_package_is_hidden_while_the_package_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As httpx's command line."""
    (tmp_path / "with_program").mkdir()
    program = "try:\n    from ._main import main\nexcept ImportError:\n    main = None\n"
    (tmp_path / "with_program" / "__init__.py").write_text(program)
    (tmp_path / "with_program" / "_main.py").write_text("main = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    with hidden("with_program._main"):
        package = import_module("with_program")
    assert package.main is None
    assert import_module("with_program._main").main == 1


def test_installed_packages_are_looked_through_when_one_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier versions of transformers, as 5.0, keep a list of them from their import on."""
    looks, find = list[int](), metadata.packages_distributions

    def counted() -> Any:
        looks.append(1)
        return find()

    monkeypatch.setattr(metadata, "packages_distributions", counted)
    with lean_transformers._packages_when_needed():
        kept = metadata.packages_distributions()
    assert metadata.packages_distributions is counted
    assert looks == []
    assert kept["mlx_lm"] == find()["mlx_lm"]
    assert (dict(kept), "none_such" in kept, len(looks)) == (dict(find()), False, 1)
