"""What `kvasir doctor` says of well-known models follows from their layouts."""

import pytest

from inference_svc.model.probing.real_layouts import REAL_LAYOUTS, byte_costs

# 4 bits and two 16-bit numbers for each 64 values, against 16 bits.
RATIO = (4 + 32 / 64) / 16


@pytest.mark.parametrize("name", REAL_LAYOUTS)
def test_four_bits_are_281_thousandths_of_sixteen_in_every_family(name: str) -> None:
    found = byte_costs(REAL_LAYOUTS[name])
    assert found["kv_bytes_per_token"] == RATIO * found["kv_bytes_per_token_fp16"]
    assert sum(kind["count"] for kind in found["layers"]) == len(REAL_LAYOUTS[name])
    kinds = {kind["kind"] for kind in found["layers"]}
    assert found["window_bytes"] == RATIO * found["window_bytes_fp16"]
    assert bool(found["window_bytes"]) == ("window" in kinds)
    assert bool(found["state_bytes"]) == ("state" in kinds)


def test_the_numbers_are_those_of_the_models_cards() -> None:
    """Llama 3.1 8B: 32 layers of 8 heads of 128, K and V: 128 KiB a token at fp16."""
    assert byte_costs(REAL_LAYOUTS["Llama 3.1 8B"])["kv_bytes_per_token_fp16"] == 128 << 10
    gemma = byte_costs(REAL_LAYOUTS["Gemma 3 4B"])
    assert gemma["kv_bytes_per_token_fp16"] == 5 * 2 * 4 * 256 * 2
    assert gemma["window_bytes_fp16"] == 29 * 1023 * 2 * 4 * 256 * 2
    granite = byte_costs(REAL_LAYOUTS["Granite 4.0 H Tiny"])
    assert granite["state_bytes"] == granite["state_bytes_fp16"] == 36 * (3 * 3328 * 2 + 48 * 64 * 128 * 4)
