"""Products of a few rows by the kernel, emulated, beside products in 32 bits; and the layers of a model that use it."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn

from inference_svc.kv.attention.fused import COMPILERS, compiled
from inference_svc.kv.attention.kernels import Dialect
from inference_svc.kv.model_hooks import few_rows as module
from inference_svc.kv.model_hooks.few_rows import MAX_ROWS, few_rows, take_few_rows
from tests.emulation.emulator import cuda_emulator
from tests.inference.kv.attention.emulators import needs_compiler

pytestmark = needs_compiler
SMALL_BYTES, MEDIUM_BYTES = 99 << 10, 163 << 10  # of a block's shared memory, where it is least, and on an A100


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    if mx.default_device().type == mx.DeviceType.cpu:
        monkeypatch.setitem(COMPILERS, Dialect.CUDA, cuda_emulator)


def error(found: mx.array, x: mx.array, w: mx.array) -> float:
    right = x.astype(mx.float32) @ w.astype(mx.float32).T
    return float(mx.linalg.norm(found.astype(mx.float32) - right) / mx.linalg.norm(right))  # type: ignore[arg-type]


@pytest.mark.long(5)
@pytest.mark.parametrize(("dtype", "most"), [(mx.bfloat16, 4e-3), (mx.float16, 5e-4)])
@pytest.mark.parametrize(("widths", "depth"), [((48,), 1160), ((33, 16, 7), 256), ((64, 96), 40), ((4290,), 40)])
def test_products_are_near_and_a_row_has_the_same_bits_beside_any_others(
    widths: Sequence[int], depth: int, dtype: mx.Dtype, most: float
) -> None:
    mx.random.seed(3)
    matrices = [mx.random.normal((width, depth)).astype(dtype) for width in widths]
    x = mx.random.normal((MAX_ROWS, depth)).astype(dtype)
    whole = few_rows(x, [(w,) for w in matrices])
    for rows in (1, 8, 9, 17, MAX_ROWS):
        for y, w, all_rows in zip(few_rows(x[-rows:], [(w,) for w in matrices]), matrices, whole, strict=True):
            assert error(y, x[-rows:], w) < most
            assert mx.array_equal(y, all_rows[-rows:])


@pytest.mark.long(10)
@pytest.mark.parametrize(("dtype", "most"), [(mx.bfloat16, 4e-3), (mx.float16, 5e-4)])
@pytest.mark.parametrize(
    ("widths", "depth", "group"), [((48,), 192, 32), ((33, 16, 7), 256, 64), ((64, 96), 512, 64), ((4290,), 128, 128)]
)
def test_packed_matrices_give_what_their_values_give_and_a_row_has_the_same_bits_beside_any_others(
    widths: Sequence[int], depth: int, group: int, dtype: mx.Dtype, most: float
) -> None:
    mx.random.seed(3)
    matrices = [mx.quantize(mx.random.normal((width, depth)).astype(dtype) + 1, group, 4) for width in widths]
    x = mx.random.normal((MAX_ROWS, depth)).astype(dtype)
    whole = few_rows(x, matrices)
    for rows in (1, 8, 9, 17, MAX_ROWS):
        for y, matrix, all_rows in zip(few_rows(x[-rows:], matrices), matrices, whole, strict=True):
            values = mx.dequantize(
                *(part.astype(mx.float32) if at else part for at, part in enumerate(matrix)), group, 4
            )
            assert error(y, x[-rows:], values) < most
            assert mx.array_equal(y, all_rows[-rows:])


@pytest.mark.parametrize(("group", "wide"), [(0, 1), (64, 1), (64, 16_384)], ids=["16 bits", "wide", "narrow"])
def test_a_sum_has_one_order_for_rows_of_any_number(group: int, wide: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Great numbers that cancel each other show where in the sum they came."""
    monkeypatch.setattr(module, "_WIDE", wide)
    mx.random.seed(8)
    x, w = (mx.random.normal((rows, 1024)) for rows in (MAX_ROWS, 33))
    x[:, :64] *= 2**18
    x[:, 512:576], w[:, 512:576] = -x[:, :64], w[:, :64]
    w = w.astype(mx.bfloat16)
    matrix, x = mx.quantize(w, group, 4) if group else (w,), x.astype(mx.bfloat16)
    (all_rows,) = few_rows(x, [matrix])
    for rows in (1, 17):
        assert mx.array_equal(few_rows(x[:rows], [matrix])[0], all_rows[:rows])


@pytest.mark.parametrize(("group", "most"), [(0, SMALL_BYTES), (64, SMALL_BYTES), (64, MEDIUM_BYTES)])
def test_a_device_of_less_shared_memory_takes_smaller_blocks_and_a_row_has_the_same_bits_in_each(
    group: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mx.random.seed(6)
    x, w = (mx.random.normal((rows, 2048)).astype(mx.bfloat16) for rows in (MAX_ROWS, 40))
    matrix, taken = mx.quantize(w, group, 4) if group else (w,), list[int]()
    (large,) = few_rows(x, [matrix])
    monkeypatch.setattr(module, "most_shared_bytes", lambda: most)
    monkeypatch.setattr(module, "compiled", lambda *source: taken.append(source[2]) or compiled(*source))
    (found,) = few_rows(x, [matrix])
    assert taken[0] <= most
    assert mx.array_equal(few_rows(x[:1], [matrix])[0], found[:1])
    assert error(found, x, mx.dequantize(*matrix, group, 4) if group else w) < 5e-3
    # Where there is no room for the warps that share a packed sum elsewhere, its order is another.
    assert mx.array_equal(found, large) or (group and most == SMALL_BYTES)


@pytest.mark.parametrize(
    ("widths", "height", "usual"),
    [((14_336,) * 2, 7, 4), ((11_008,) * 2, 4, 4), ((4096, 1024, 1024), 3, 2), ((4096,), 2, 2)],
)
def test_blocks_of_9_to_16_rows_of_codes_have_the_same_work_and_the_bits_of_other_blocks(
    widths: tuple[int, ...], height: int, usual: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    warps = module._warps(64, sum(widths))
    assert module._block_shape(16, widths, 64, warps)[1] == height
    mx.random.seed(9)
    x, *values = (mx.random.normal((rows, 512)).astype(mx.bfloat16) for rows in (13, 150, 150))
    matrices = [mx.quantize(each, 64, 4) for each in values]
    monkeypatch.setattr(module, "_warps", lambda *_: warps)
    made = []
    for only in (usual, height):
        monkeypatch.setattr(module, "_HEIGHTS", {warps: {only: 1}})
        made.append([*few_rows(x, matrices), *few_rows(x, matrices, is_gated=True)])
    assert all(mx.array_equal(one, other) for one, other in zip(*made, strict=True))


@pytest.mark.parametrize(
    ("rows", "group", "most", "is_taken"),
    [
        (32, 32, SMALL_BYTES, True),
        (33, 32, SMALL_BYTES, False),
        (64, 64, SMALL_BYTES, True),
        (64, 64, MEDIUM_BYTES, True),
        (64, 32, MEDIUM_BYTES, True),
    ],
)
def test_a_matrix_whose_scales_leave_a_block_no_room_is_mlxs_own(
    rows: int, group: int, most: int, is_taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer: Any = nn.QuantizedLinear(28_672, 8, bias=False, group_size=group, bits=4)
    layer.set_dtype(mx.bfloat16)
    take_few_rows(layer)
    x = mx.zeros((rows, 28_672), mx.bfloat16)
    assert layer.together.takes(x)
    monkeypatch.setattr(module, "most_shared_bytes", lambda: most)
    assert layer.together.takes(x) == is_taken


@pytest.mark.parametrize("shape", [(8,), (8, 1), (1, 8), (2, 4), (2, 2, 2)])
def test_rows_of_any_shape_keep_it_and_a_models_own_needs_no_change(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    mx.random.seed(5)
    w, x = (mx.random.normal((rows, 64)).astype(mx.bfloat16) for rows in (33, 8))
    (right,), given, taken = few_rows(x, [(w,)]), x.reshape(*shape, 64), list[mx.array]()

    def noted(*source: Any) -> Any:
        kernel = compiled(*source)
        return lambda inputs, **options: taken.append(inputs[0]) or kernel(inputs=inputs, **options)

    monkeypatch.setattr(module, "compiled", noted)
    (found,) = few_rows(given, [(w,)])
    assert found.shape == (*shape, 33)
    assert mx.array_equal(found.reshape(8, 33), right)
    assert len(shape) != 2 or taken[0] is given


class Attention(nn.Module):
    def __init__(self, dtype: mx.Dtype) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(64, 32, bias=True), nn.Linear(64, 16, bias=False)
        self.v_proj, self.o_proj = nn.Linear(64, 16, bias=False), nn.Linear(64, 24, bias=False)
        self.embedding = nn.Embedding(40, 64)
        self.set_dtype(dtype)

    def __call__(self, x: mx.array) -> list[mx.array]:
        projections: list[Any] = [self.q_proj, self.k_proj, self.v_proj, self.o_proj, self.embedding.as_linear]
        return [each(x) for each in projections]


def packed(model: Attention, bits: int) -> Attention:
    """Pack a model's matrices; returns one with their values in 16 bits."""
    nn.quantize(model, 64, bits)
    plain = Attention(mx.bfloat16)
    for name, layer in model.leaf_modules().items():
        values = mx.dequantize(layer.weight, layer.scales, layer.biases, 64, bits)
        plain[name].update({"weight": values, **({"bias": layer.bias} if "bias" in layer else {})})
    return plain


@pytest.mark.parametrize(
    ("rows", "bits", "launches"),
    [(3, 16, 3), (MAX_ROWS + 1, 16, 0), (3, 4, 3), (MAX_ROWS + 1, 4, 0), (3, 8, 0)],
)
def test_a_models_projections_of_one_x_share_a_launch_and_many_rows_are_mlxs_own(
    rows: int, bits: int, launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mx.random.seed(4)
    model = plain = Attention(mx.bfloat16)
    if bits < 16:
        plain = packed(model, bits)
    inputs = [mx.random.normal((rows, 1, 64)).astype(mx.bfloat16) for _ in range(2)]
    right = [plain(x) for x in inputs]
    counted: list[int] = []
    monkeypatch.setattr(module, "few_rows", lambda x, ws, **_: counted.append(len(ws)) or few_rows(x, ws))
    take_few_rows(model)
    for x, expected in zip(inputs, right, strict=True):
        counted.clear()
        found = model(x)
        assert len(counted) == launches
        for one, other in zip(found, expected, strict=True):
            assert one.shape == other.shape
            assert mx.allclose(one, other, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", [(1, MAX_ROWS + 1), (2, 64)])
def test_many_rows_are_multiplied_by_the_values_of_packed_matrices(
    shape: tuple[int, ...], bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mx.random.seed(7)
    model = Attention(mx.bfloat16)
    plain, x = packed(model, bits), mx.random.normal((*shape, 64)).astype(mx.bfloat16)
    right = plain(x)
    take_few_rows(model)
    monkeypatch.setattr(mx, "quantized_matmul", lambda *_, **__: pytest.fail("by codes"))
    for found, expected in zip(model(x), right, strict=True):
        assert found.shape == expected.shape
        assert mx.allclose(found, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(("width", "depth", "calls"), [(96, 64, 0), (4096, 64, 0), (96, 128, 1), (1024, 1024, 1)])
def test_a_packed_matrix_of_few_inputs_is_multiplied_by_its_values(
    width: int, depth: int, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer: Any = nn.QuantizedLinear(depth, width, bias=True, group_size=64, bits=8)
    layer.bias = mx.arange(width, dtype=mx.float32)
    x = mx.random.normal((3, 1, depth), key=mx.random.key(1))
    values = mx.dequantize(layer.weight, layer.scales, layer.biases, 64, 8)
    take_few_rows(layer)
    mlxs, counted = mx.quantized_matmul, list[int]()
    monkeypatch.setattr(mx, "quantized_matmul", lambda *given, **how: counted.append(1) or mlxs(*given, **how))
    assert mx.allclose(layer(x), x @ values.T + layer.bias, rtol=1e-2, atol=1e-2)
    assert len(counted) == calls


def test_a_matrix_whose_biases_have_another_type_than_its_scales_is_mlxs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.QuantizedLinear(64, 32, bias=False, group_size=64, bits=4)
    layer.scales = layer.scales.astype(mx.bfloat16)
    take_few_rows(layer)
    monkeypatch.setattr(module, "few_rows", lambda *_, **__: pytest.fail("by the kernel"))
    assert layer(mx.zeros((1, 1, 64), mx.bfloat16)).shape == (1, 1, 32)
