"""Synthetic models: their configurations are the real ones, they load, and their tokens depend on the context."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from kvasir.errors import FailedPrecondition, InvalidArgument
from kvasir_bench.synthetic.geometries import GEOMETRIES, geometry
from kvasir_bench.synthetic.weights import write_model
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import _get_classes

from inference_svc.engine.engine import Engine
from inference_svc.model.loading import load
from inference_svc.model.probing.real_layouts import REAL_LAYOUTS
from tests.inference.engine.driving import Driver
from tests.inference.engine.families import GEMMA3, GPT_OSS

# Parameters of the language models in billions, as published.
PARAMETERS = {
    "llama-3.1-8b": 8.03,
    "llama-3.2-1b": 1.24,
    "gemma-3-4b": 3.88,
    "gemma-3-12b": 11.77,
    "gpt-oss-20b": 20.91,
    "qwen-2.5-7b": 7.62,
    "qwen-2.5-14b": 14.77,
    "qwen-3-8b": 8.19,
    "kvasir-tiny": 0.00656,
}
LAYOUTS = {
    "llama-3.1-8b": "Llama 3.1 8B",
    "gemma-3-4b": "Gemma 3 4B",
    "gemma-3-12b": "Gemma 3 12B",
    "gpt-oss-20b": "GPT-OSS 20B",
    "qwen-2.5-7b": "Qwen 2.5 7B",
    "qwen-3-8b": "Qwen 3 8B",
}


def made(config: dict[str, Any]) -> Any:
    """mlx-lm's model; its parameters are never evaluated."""
    make_model, make_arguments = _get_classes(config)
    return make_model(make_arguments.from_dict(config))


@pytest.mark.parametrize("name", GEOMETRIES)
def test_a_geometry_has_as_many_parameters_as_the_published_model(name: str) -> None:
    config = geometry(name)
    parameters: Any = tree_flatten(made(config).parameters())
    shapes = {name: value.shape for name, value in parameters}
    if config["tie_word_embeddings"]:
        shapes.pop("lm_head.weight", None)
    count = sum(int(mx.array(shape).prod()) if shape else 1 for shape in shapes.values())
    assert count / 1e9 == pytest.approx(PARAMETERS[name], rel=0.005)


@pytest.mark.parametrize(("name", "layout"), LAYOUTS.items())
def test_a_geometry_keeps_what_the_table_of_real_layouts_says(name: str, layout: str) -> None:
    config, layers = geometry(name), REAL_LAYOUTS[layout]
    caches = make_prompt_cache(made(config))
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    found = [(getattr(cache, "max_size", 0), config["num_key_value_heads"], dim) for cache in caches]
    assert found == [(layer.window, layer.kv_heads, layer.key_dim) for layer in layers]


def test_a_model_can_be_cut_but_keeps_a_layer_of_each_kind() -> None:
    assert geometry("llama-3.1-8b-2l") == geometry("llama-3.1-8b", 2)
    assert geometry("gpt-oss-20b", 2)["layer_types"] == ["sliding_attention", "full_attention"]
    for name, layers in (("gemma-3-12b", 5), ("gpt-oss-20b", 1), ("llama-3.1-8b", 0), ("llama-3.1-8b", 33)):
        with pytest.raises(InvalidArgument, match="layers: expected"):
            geometry(name, layers)
    with pytest.raises(InvalidArgument, match=r"gemma-3-12b"):
        geometry("gemma-4")


@pytest.mark.long(2)
@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize(
    "config", [geometry("kvasir-tiny", 3), GEMMA3, GPT_OSS], ids=lambda config: str(config["model_type"])
)
def test_a_written_model_loads_and_its_tokens_depend_on_all_before(
    config: dict[str, Any], bits: int | None, tmp_path: Path
) -> None:
    size = write_model(tmp_path / "model", config, bits=bits)
    model: Any = load(tmp_path / "model", None).model
    stored = sum(path.stat().st_size for path in (tmp_path / "model").glob("*.safetensors"))
    assert 0 <= stored - size < 100_000
    prompt = [5 + n * n % 1000 for n in range(80)]
    first, other = (model(mx.array([[start, *prompt]]))[0, -1] for start in (3, 4))
    assert mx.isfinite(first).all().item()
    assert mx.abs(first - other).max().item() > 0.1 * mx.abs(first).max().item()
    assert len({int(token) for token in model(mx.array([prompt]))[0].argmax(-1).tolist()}) > 40, "it does not loop"


def test_a_cut_model_has_the_same_layers_as_the_whole_one(tmp_path: Path) -> None:
    def tensors(name: str, layers: int, seed: int) -> dict[str, mx.array]:
        write_model(tmp_path / name, geometry("kvasir-tiny", layers), seed=seed)
        found: dict[str, mx.array] = {}
        for path in (tmp_path / name).glob("*.safetensors"):
            found |= mx.load(str(path))  # type: ignore[arg-type]
        return found

    whole, cut, other = tensors("whole", 3, 0), tensors("cut", 2, 0), tensors("other", 2, 1)
    assert set(cut) < set(whole)
    assert all(mx.array_equal(whole[name], tensor) for name, tensor in cut.items())
    name = "model.layers.1.mlp.up_proj.weight"
    assert not mx.array_equal(other[name], cut[name])
    assert not mx.array_equal(cut[name], cut[name.replace("1", "0")])


def test_the_engine_opens_it_and_spells_every_token_of_a_larger_vocabulary(tmp_path: Path) -> None:
    config = geometry("kvasir-tiny", 2) | {"vocab_size": 3000}
    write_model(tmp_path / "model", config)
    engine = Engine.open(tmp_path / "model", cache_dir=tmp_path, memory_budget_bytes=64 << 20)
    try:
        text, chars = engine.token_text.spell(range(1024, 3000))
        assert text.startswith(" w1024 w1025")
        assert set(chars) == {6}
        assert engine.tokenizer.decode([1500, 2999]) == " w1500 w2999"
        assert engine.tokenizer.encode("<tool_call>", add_special_tokens=False) == [1022]
        assert max(engine.tokenizer.encode(text)) < 1024
        assert engine.model.context_tokens == config["max_position_embeddings"]
        ended = Driver(engine).turn(range(5, 100), max_tokens=40)
        assert max(ended.state.token_ids) >= 1024, "the model says tokens beyond kvasir-tiny's"
    finally:
        engine.close()


def test_a_directory_that_holds_something_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(FailedPrecondition, match="not empty"):
        write_model(tmp_path, geometry("kvasir-tiny", 1))
    with pytest.raises(InvalidArgument, match="dtype"):
        write_model(tmp_path / "new", geometry("kvasir-tiny", 1), compute_type="int4")
