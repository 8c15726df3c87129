"""Heads that the results of emulated kernels cut, where a model changes shapes: bits and nodes of a step."""

import io
import re
from collections import Counter
from typing import Any

import mlx.core as mx
import pytest
from kvasir.cachestore.v1 import identity_pb2
from mlx_lm.models import gemma3_text, llama, qwen3

from inference_svc.kv.attention.fused import COMPILERS
from inference_svc.kv.attention.kernels import Dialect
from inference_svc.kv.batch.decode_batch import DecodeBatch
from inference_svc.kv.batch.decode_step import PassRows
from inference_svc.kv.layout import shown_layout
from inference_svc.kv.model_hooks import attention_hook, few_rows, joined_steps
from inference_svc.kv.model_hooks.joined_steps import join_steps
from inference_svc.kv.pages.pool import KvPool
from inference_svc.kv.policy import Rung, policy_of
from inference_svc.kv.sequence_kv import SequenceKV
from tests.emulation.emulator import cuda_emulator
from tests.inference.kv.attention.emulators import needs_compiler
from tests.inference.kv.attention.joined.test_joined_steps import BITS, QWEN3, small

pytestmark = needs_compiler


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    if mx.default_device().type == mx.DeviceType.cpu:
        monkeypatch.setitem(COMPILERS, Dialect.CUDA, cuda_emulator)


GEMMA3 = {"rope_theta": 1e4, "query_pre_attn_scalar": 64.0, "sliding_window": 3, "sliding_window_pattern": 2}
ATTENDING = pytest.mark.parametrize(
    ("kind", "changed"),
    [(llama, {}), (qwen3, QWEN3), (gemma3_text, GEMMA3)],
    ids=["llama", "qwen3", "gemma3"],
)


def normed(model: Any) -> Any:
    """With norms whose weights differ."""
    for number, (name, module) in enumerate(model.named_modules()):
        if name.endswith("norm"):
            module.weight = mx.random.uniform(0.5, 1.5, module.weight.shape, mx.bfloat16, mx.random.key(number))
    return model


def batch_over_pages(model: Any, sequences: int, monkeypatch: pytest.MonkeyPatch, **options: Any) -> DecodeBatch:
    """Of so many new sequences, whose step is no kept graph: an emulated kernel has no place in one."""
    for mlx_lm_module in (llama, qwen3, gemma3_text):
        monkeypatch.setattr(mlx_lm_module, "scaled_dot_product_attention", attention_hook.attention)
    if mx.default_device().type == mx.DeviceType.cpu:
        monkeypatch.setattr(mx, "compile", lambda function: function)
    layout = shown_layout(model)
    identity = identity_pb2.KvIdentity(layers=layout.entries, policy=policy_of(Rung.Q4, "bfloat16"))
    pool = KvPool(identity, 1 << 20, is_allocated=True, dialect=Dialect.CUDA)
    batch = DecodeBatch(pool, lambda tokens, layers: layout.forward(model, tokens, layers), 0, **options)
    for _ in range(sequences):
        batch.join(SequenceKV(pool))
    return batch


def steps_of(batch: DecodeBatch) -> tuple[list[mx.array], list[mx.array]]:
    """The logits of some steps, and all pages behind them. Each step is a graph of its own, as in an engine: in one
    graph a device orders no kernel behind another that writes what it reads.
    """
    rows, logits = len(batch), []
    for step in range(6):
        logits.append(batch.step([(7 * step + 5 * row) % 90 for row in range(rows)]))
        mx.eval(logits)
    return logits, batch._pool.arrays


@pytest.mark.long(34)
@pytest.mark.parametrize("sequences", [1, 3])
@ATTENDING
@BITS
def test_heads_that_the_kernels_cut_have_the_bits_of_changed_shapes(
    kind: Any, changed: dict[str, Any], bits: int, sequences: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = [normed(small(kind, bits, **{"head_dim": 64, **changed})) for _ in range(2)]
    join_steps(models[0])
    with monkeypatch.context() as patch:
        patch.setattr(joined_steps, "_ATTENTIONS", ())
        join_steps(models[1])
    assert len({type(model.layers[0].self_attn) for model in models}) == 2
    (found, pages), (right, right_pages) = (
        steps_of(batch_over_pages(model, sequences, monkeypatch)) for model in models
    )
    assert all(map(mx.array_equal, found, right))
    assert len({row.tobytes() for row in map(memoryview, found)}) == len(found), "steps that see each other's rows"
    assert all(map(mx.array_equal, pages, right_pages))


@pytest.mark.long(13)
@pytest.mark.parametrize("by_kernel", [False, True])
@BITS
def test_a_window_of_masks_has_the_same_bits_with_heads_that_its_products_cut(
    bits: int, by_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def logits(attentions: tuple[str, ...]) -> list[mx.array]:
        model = normed(small(qwen3, bits, **{**QWEN3, "head_dim": 64}))
        with monkeypatch.context() as patch:
            patch.setattr(joined_steps, "_ATTENTIONS", attentions)
            join_steps(model)
        batch = batch_over_pages(model, 2, monkeypatch, has_window_kernel=by_kernel)
        made = [batch.pass_of(range(2, 10), [PassRows(2, (2, 3)), PassRows(1, (1, 3, 2))])]
        mx.eval(made)
        made.append(batch.pass_of(range(10, 16), [PassRows(0, (2, 3, 4)), PassRows(3, ())]))
        mx.eval(made)
        return [*made, *batch._pool.arrays]

    found, right = logits(joined_steps._ATTENTIONS), logits(())
    assert all(map(mx.array_equal, found, right))


class _Node:
    """A kernel that is one node of MLX's graph, and computes nothing."""

    def __init__(self, *_: Any) -> None:
        pass

    def __call__(self, *, inputs: Any, output_shapes: Any, output_dtypes: Any, **_: Any) -> list[mx.array]:
        return list(mx.depends([mx.zeros(*each) for each in zip(output_shapes, output_dtypes, strict=True)], inputs))


@ATTENDING
@BITS
def test_no_node_of_a_layer_changes_a_shape_alone(
    kind: Any, changed: dict[str, Any], bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nodes(layers: int) -> Counter[str]:
        model = small(kind, bits, **{"head_dim": 64, **changed, "num_hidden_layers": layers})
        join_steps(model)
        mx.eval(model.parameters())
        text = io.StringIO()
        mx.export_to_dot(text, batch_over_pages(model, 2, monkeypatch).step([3, 4]))  # type: ignore[no-untyped-call]
        return Counter(re.findall(r'label ?="?([A-Za-z]+)', text.getvalue()))

    monkeypatch.setitem(COMPILERS, Dialect.CUDA, _Node)
    monkeypatch.setattr(mx.fast, "rope", lambda x, *_, **__: mx.depends([x], [x])[0])
    more = nodes(4) - nodes(2)
    assert more["Depends"], "of the layers more"
    assert not more.keys() & {"Reshape", "Transpose"}


@pytest.mark.parametrize("case", ["biases", "another launch", "many rows", "no pages", "others' attention"])
def test_projections_without_a_launch_for_all_of_them_keep_the_models_own_call(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[Any] = []
    monkeypatch.setattr(few_rows.JointProducts, "heads", lambda *given: used.append(given))
    if case == "others' attention":
        monkeypatch.setattr(llama, "scaled_dot_product_attention", print)
    model = small(llama, 16, head_dim=64, attention_bias=case == "biases")
    for layer in model.layers if case == "another launch" else ():
        value = layer.self_attn.v_proj
        value.together = few_rows.JointProducts([value])
    join_steps(model)
    if case == "many rows":
        monkeypatch.setattr(few_rows, "MAX_ROWS", 1)
    if case == "others' attention":
        assert type(model.layers[0].self_attn) is llama.Attention
    elif case == "no pages":
        model(mx.array([[3]]))
    else:
        monkeypatch.setitem(COMPILERS, Dialect.CUDA, _Node)
        batch_over_pages(model, 2, monkeypatch).step([3, 4])
    assert not used
