"""The store's benchmark runs, says what it measured, and compares within one run. No timing is asserted."""

import json
from pathlib import Path

from kvasir.bench.store import run


def test_a_quick_run_measures_everything(tmp_path: Path) -> None:
    said: list[str] = []
    results = run(True, directory=tmp_path, is_quick=True, startup_blobs=50, say=said.append)
    assert json.loads(said[0]) == json.loads(json.dumps(results))
    assert [size["name"] for size in results["sizes"]] == ["kvasir-tiny", "llama-3.1-8b"]
    assert 9.0e6 < results["sizes"][1]["block_bytes"] < 9.8e6
    for size in results["sizes"]:
        assert set(size["mb_per_s"]) == {"tcp", "write_fsync", "blake3", "put", "get", "pull"}
        assert all(rate > 0 for rate in size["mb_per_s"].values())
    assert results["startup"]["blobs"] == 50
    assert len(results["targets"]) == 4
    assert list(tmp_path.iterdir()) == []
