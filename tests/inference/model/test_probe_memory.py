"""What a probe showed is kept for the next start, which then serves the same without a probe."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from inference_svc.engine.engine import Engine
from inference_svc.kv.kept_files import KeptDirs, keep_bytes
from inference_svc.kv.layout import Layout
from inference_svc.model import device_memory, model_runner, open_model
from inference_svc.model.loading import load
from inference_svc.model.model_runner import ModelRunner
from inference_svc.model.probing import layout_trial, probe_memory
from inference_svc.model.probing.probe_memory import Probed, ProbeMemory
from tests.inference.engine.families import ALL, BUDGET, LLAMA31, write_family
from tests.made_models.sampling import first_and_in_turn

TOKENS = list(range(1, 30))


def opened(directory: Path, state: Path) -> Engine:
    return Engine.open(directory, cache_dir=state, memory_budget_bytes=BUDGET)


def logits(runner: ModelRunner) -> mx.array:
    kv = model_runner.SequenceKV(runner.new_pool(default_policy(runner)))
    return runner.last_logits(kv, TOKENS)


def default_policy(runner: ModelRunner) -> Any:
    from inference_svc.kv.policy import PolicyRequest, Rung

    return PolicyRequest(Rung.FP).policy(Rung.FP, runner.compute_type, len(runner.layers))


@pytest.mark.long(2)
@pytest.mark.parametrize("name", ALL)
def test_a_runner_of_kept_facts_computes_what_a_probed_one_does(name: str, tmp_path: Path) -> None:
    directory = write_family(tmp_path / "model", ALL[name])
    memory = ProbeMemory(tmp_path, "some weights", "float32", "reference")
    probed = ModelRunner(load(directory, "float32").model)
    memory.write(probed.probed)
    kept = ModelRunner(load(directory, "float32").model, known=memory.read())
    assert kept.probed == probed.probed
    assert kept.layers == probed.layers
    assert bool(mx.array_equal(logits(kept), logits(probed)).item())


def test_the_second_start_of_a_model_probes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_family(tmp_path / "model", LLAMA31)
    first = opened(directory, tmp_path)
    first.close()
    probes = []
    monkeypatch.setattr(model_runner, "shown_layout", probes.append)
    monkeypatch.setattr(model_runner, "tried_layout", probes.append)
    second = opened(directory, tmp_path)
    second.close()
    assert second.model == first.model
    assert probes == []


def test_other_weights_are_probed_again(tmp_path: Path) -> None:
    one = ProbeMemory(tmp_path, "one", "float32", "reference")
    one.write(Probed(ModelRunner(load(write_family(tmp_path / "m", LLAMA31), "float32").model).probed.layout, 7, 0))
    assert one.read() is not None
    assert ProbeMemory(tmp_path, "another", "float32", "reference").read() is None
    assert ProbeMemory(tmp_path, "one", "bfloat16", "reference").read() is None


@pytest.mark.parametrize(
    "content",
    first_and_in_turn(
        ["", '{"entries":["zz"]}', "[]", "{}", '{"entries":["ff"],"by_cache":[0]}', "null"], seconds=1, first=2
    ),
)
def test_kept_facts_that_cannot_be_read_are_none(content: str, tmp_path: Path) -> None:
    directory = write_family(tmp_path / "model", LLAMA31)
    opened(directory, tmp_path).close()
    (kept,) = (tmp_path / "probes").iterdir()
    whole = kept.read_bytes()
    keep_bytes(kept, content.encode())
    opened(directory, tmp_path).close()
    assert kept.read_bytes() == whole


def test_kept_facts_that_are_damaged_are_none(tmp_path: Path) -> None:
    directory = write_family(tmp_path / "model", LLAMA31)
    memory = ProbeMemory(tmp_path, "some weights", "float32", "reference")
    memory.write(ModelRunner(load(directory, "float32").model).probed)
    (kept,) = (tmp_path / "probes").iterdir()
    kept.write_bytes(kept.read_bytes().replace(b'"reads_pages": false', b'"reads_pages": true '))
    assert memory.read() is None


def test_on_a_gpu_a_probe_is_kept_for_all_homes_of_a_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_family(tmp_path / "model", LLAMA31)
    probes = []
    tried = model_runner.tried_layout
    monkeypatch.setattr(model_runner, "tried_layout", lambda *given: (probes.append(given), tried(*given))[1])
    for on, home in (("cpu", "a"), ("cpu", "b"), ("cuda", "c"), ("cuda", "d")):
        monkeypatch.setattr(open_model, "device", lambda on=on: on)
        Engine.open(
            directory, cache_dir=tmp_path / home, kept_dir=tmp_path / "kept", memory_budget_bytes=BUDGET
        ).close()
    assert len(probes) == 3
    assert {path.name for path in (tmp_path / "kept").iterdir()} - {"checks"} == {"probes"}, "and a real GPU's checks"


@pytest.mark.parametrize(("error", "is_kept"), [(RuntimeError, False), (MemoryError, False), (ValueError, True)])
def test_a_probe_that_a_devices_want_of_memory_ended_is_made_again(
    error: type[Exception], is_kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else kernels would serve the model in no home any more."""
    batched = layout_trial._Trial._batched

    def fail(trial: Any, layout: Layout) -> mx.array:
        if layout.reads_pages:
            raise error
        return batched(trial, layout)

    monkeypatch.setattr(layout_trial._Trial, "has_kernels", True)
    monkeypatch.setattr(layout_trial._Trial, "_batched", fail)
    engine = opened(write_family(tmp_path / "model", LLAMA31), tmp_path)
    engine.close()
    assert (tmp_path / "probes").exists() == is_kept
    assert bool(engine.kernels.failure) == (not is_kept)


@pytest.mark.parametrize(
    "fact", ["card", "device_bytes", "device_name", "device_settings", "_driver", "_mlx", "_code_digest"]
)
def test_on_another_device_or_driver_nothing_is_known(
    fact: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def name() -> Path:
        return ProbeMemory(tmp_path, "weights", None, "cuda")._path

    before = name()
    assert name() == before
    monkeypatch.setattr(probe_memory, fact, lambda: ("another",) if fact == "_mlx" else "another")
    assert name() != before


@pytest.mark.parametrize("setting", ["CUDA_VISIBLE_DEVICES", "MLX_ENABLE_TF32", "NVIDIA_TF32_OVERRIDE", "LD_PRELOAD"])
def test_a_setting_of_the_device_is_a_condition(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = device_memory.device_settings()
    monkeypatch.setenv(setting, "7")
    assert device_memory.device_settings() != before


def test_with_another_compiler_of_cuda_nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its wheel is renewed alone, and MLX stays."""
    (tmp_path / "mlx").mkdir()
    (tmp_path / "mlx" / "core.so").touch()
    monkeypatch.setattr(probe_memory.mx, "__file__", str(tmp_path / "mlx" / "core.so"))
    compiler = tmp_path / "nvidia_cuda_nvrtc_cu12-12.9.41.dist-info"
    compiler.mkdir()
    before = ProbeMemory(tmp_path, "weights", None, "cuda")._path
    compiler.rename(tmp_path / "nvidia_cuda_nvrtc_cu12-12.9.86.dist-info")
    assert ProbeMemory(tmp_path, "weights", None, "cuda")._path != before


def test_a_device_without_kernels_and_a_driver_that_is_not_known_keep_no_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe_memory.mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(probe_memory, "_conditions", lambda: ("these",))
    monkeypatch.setattr(probe_memory.mx.metal, "is_available", lambda: False)
    monkeypatch.setattr(probe_memory, "_driver", lambda: "")
    assert probe_memory.kept_checks(KeptDirs(tmp_path, tmp_path)) is None
    monkeypatch.setattr(probe_memory, "_driver", lambda: "580")
    assert probe_memory.kept_checks(KeptDirs(tmp_path, tmp_path)) is not None
    assert probe_memory.kept_checks(None) is probe_memory.kept_checks(KeptDirs(tmp_path)) is None
    monkeypatch.setattr(probe_memory.mx, "default_device", lambda: mx.Device(mx.cpu))
    assert probe_memory.kept_checks(KeptDirs(tmp_path, tmp_path)) is None
