"""Weights over mapped pages are the weights that mlx-lm reads: to the bit, in every family, from any file."""

import gc
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from kvasir.errors import FailedPrecondition
from kvasir_bench.synthetic.geometries import geometry
from kvasir_bench.synthetic.weights import write_model
from mlx.utils import tree_flatten

from inference_svc.model import loading
from inference_svc.model.loading import LoadedModel, load
from inference_svc.model.model_runner import ModelRunner
from inference_svc.model.open_model import open_model
from inference_svc.model.weights.extension import Extension, NoExtension, extension
from inference_svc.model.weights.placing import Placement, place_weights
from inference_svc.model.weights.weight_files import weight_file, weight_files
from tests.inference.engine.families import ALL, LLAMA31, write_family
from tests.inference.kv.attention.emulators import needs_compiler
from tests.made_models.sampling import first_and_in_turn

mapping = [
    needs_compiler,
    pytest.mark.cpu_only("a CUDA device has memory of its own, to which weights are copied"),
]
TOKENS = list(range(1, 40))
# A model of 120 MB, whose pages outweigh all else that loading does.
LARGE = {
    **geometry("llama-3.1-8b", 2),
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
}


SMALL = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "vocab_size": 1024}


def shift(path: Path, remainder: int, modulus: int = 8) -> None:
    """Make a file's tensors begin at such an offset, by blanks behind its header."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = content[8 : 8 + length].rstrip()
    header += b" " * ((remainder - 8 - len(header)) % modulus)
    path.write_bytes(struct.pack("<Q", len(header)) + header + content[8 + length :])


def parameters(loaded: LoadedModel) -> dict[str, mx.array]:
    found: Any = tree_flatten(loaded.model.parameters())
    return dict(found)


def logits(loaded: LoadedModel) -> mx.array:
    model: Any = loaded.model
    found: mx.array = model(mx.array([TOKENS]))
    mx.eval(found)
    return found


def same_bits(left: mx.array, right: mx.array) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return bool(mx.array_equal(mx.contiguous(left).view(mx.uint8), mx.contiguous(right).view(mx.uint8)).item())


def check_equal(directory: Path, compute_type: str | None = "float32") -> LoadedModel:
    """Mapped and copied are one model; returns the mapped one."""
    mapped, copied = load(directory, compute_type), load(directory, compute_type, copies_weights=True)
    assert copied.placement.mapped_bytes == 0
    ours, theirs = parameters(mapped), parameters(copied)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert same_bits(value, theirs[name]), name
    assert same_bits(logits(mapped), logits(copied))
    return mapped


class TestMapped:
    pytestmark = mapping

    @pytest.mark.parametrize("name", first_and_in_turn(list(ALL), seconds=2, first=3))
    def test_every_family_is_the_same_mapped_as_copied(self, name: str, tmp_path: Path) -> None:
        shift(write_family(tmp_path, ALL[name]) / "model.safetensors", 0)
        loaded = check_equal(tmp_path)
        assert loaded.placement.mapped_bytes > 0
        assert loaded.placement.read_bytes == 0, loaded.placement.in_words

    @pytest.mark.parametrize("remainder", [1, 2, 3, 4, 5, 6, 7])
    def test_tensors_at_odd_offsets_are_read_and_the_others_mapped(self, remainder: int, tmp_path: Path) -> None:
        path = tmp_path / "model.safetensors"
        sizes = {mx.float32: 4, mx.bfloat16: 2, mx.uint8: 1}
        given = {str(kind): mx.arange(40).astype(kind) for kind in sizes}
        mx.save_safetensors(str(path), given)
        shift(path, remainder)
        found = mx.load(str(path))
        assert isinstance(found, dict)
        placed = place_weights(weight_files(tmp_path), found)
        assert placed.mapped_bytes == sum(
            given[str(kind)].nbytes
            for kind, size in sizes.items()
            if weight_file(path).tensors[str(kind)].offset % size == 0
        )
        assert placed.read_bytes == sum(each.nbytes for each in given.values()) - placed.mapped_bytes
        for name, value in given.items():
            assert same_bits(found[name], value), name

    @pytest.mark.parametrize(
        ("bits", "kind"), first_and_in_turn([(4, "bfloat16"), (8, "float16"), (None, "bfloat16")], seconds=4)
    )
    def test_packed_weights_of_several_files_are_mapped(self, bits: int | None, kind: str, tmp_path: Path) -> None:
        write_model(tmp_path, {**LARGE, **SMALL}, bits=bits, compute_type=kind)
        assert len(list(tmp_path.glob("*.safetensors"))) > 1
        assert check_equal(tmp_path, kind).placement.read_bytes == 0
        in_32_bits = check_equal(tmp_path, None).placement
        assert "converted to float32" in in_32_bits.in_words
        assert bool(in_32_bits.mapped_bytes) is bool(bits), "the codes stay as they are, all else is converted"

    def test_mapped_pages_cannot_be_written(self, tmp_path: Path) -> None:
        """Of pages that may be, macOS makes copies when they are read, and keeps them in memory."""
        path = tmp_path / "model.safetensors"
        mx.save_safetensors(str(path), {"a": mx.zeros((1000,), mx.uint32)})
        shift(path, 0)
        found: Any = mx.load(str(path))
        assert place_weights(weight_files(tmp_path), found).mapped_bytes == 4000
        [permissions] = [
            line.split()[1] for line in Path("/proc/self/maps").read_text().splitlines() if str(path) in line
        ]
        assert permissions == "r--s"

    def test_results_never_take_the_place_of_mapped_weights(self, tmp_path: Path) -> None:
        """MLX writes a result over an input that nobody else holds."""
        path = tmp_path / "model.safetensors"
        mx.save_safetensors(str(path), {"a": mx.ones((1 << 16,)), "b": mx.ones((9,))})
        shift(path, 0)
        found: Any = mx.load(str(path))
        place_weights(weight_files(tmp_path), found)
        start = np.asarray(found["a"]).ctypes.data
        result = found.pop("a") + 1  # the last reference to the array is the graph's
        mx.eval(result)
        assert np.asarray(result).ctypes.data != start
        assert copied_kib(path), "the other weight keeps the pages"
        assert not any(copied_kib(path))

    def test_the_pages_go_with_the_last_array(self, tmp_path: Path) -> None:
        path = tmp_path / "model.safetensors"
        mx.save_safetensors(str(path), {name: mx.full((5000,), ord(name)) for name in "abc"})
        shift(path, 0)
        found: Any = mx.load(str(path))
        place_weights(weight_files(tmp_path), found)
        last = found["b"][10:20]
        mx.eval(last)
        del found
        gc.collect()
        assert is_mapped(path)
        assert last.tolist() == [ord("b")] * 10
        del last
        gc.collect()
        assert not is_mapped(path)

    def test_a_model_goes_on_when_its_file_is_replaced_and_deleted(self, tmp_path: Path) -> None:
        directory = write_family(tmp_path / "one", LLAMA31)
        path = directory / "model.safetensors"
        shift(path, 0)
        loaded = load(directory, "float32")
        before = logits(loaded)
        other = write_family(tmp_path / "two", LLAMA31, seed=9) / "model.safetensors"
        other.replace(path)
        assert same_bits(logits(loaded), before)
        assert not same_bits(logits(load(directory, "float32")), before), "the new file has other weights"
        path.unlink()
        assert same_bits(logits(loaded), before)

    def test_nothing_of_a_mapped_model_is_this_process_own(self, tmp_path: Path) -> None:
        path = write_family(tmp_path, LLAMA31) / "model.safetensors"
        shift(path, 0)
        loaded = load(tmp_path, "float32")
        ModelRunner(loaded.model)
        logits(loaded)
        assert copied_kib(path), "it is not mapped"
        assert not any(copied_kib(path))

    @pytest.mark.long(3)
    def test_converted_weights_stay_in_memory_once(self, tmp_path: Path) -> None:
        shape = {**LARGE, "num_hidden_layers": 1, "intermediate_size": 8192, "vocab_size": 1024}
        write_model(tmp_path, shape, bits=4)
        loaded = load(tmp_path, "float32")
        converted = loaded.placement.read_bytes
        kept = sum(in_memory_kib(path) << 10 for path in tmp_path.glob("*.safetensors"))
        assert kept < converted / 2, "the pages of what is used no more"
        assert same_bits(logits(loaded), logits(load(tmp_path, "float32", copies_weights=True)))

    @pytest.mark.long(5)
    def test_two_engines_share_the_pages_and_loading_needs_no_second_copy(self, tmp_path: Path) -> None:
        size = write_model(tmp_path, LARGE, compute_type="float32")
        first = Loader(tmp_path)
        alone = first.measured()
        assert alone["peak_growth"] <= 1.1 * size
        second = Loader(tmp_path)
        second.measured()
        both = first.pss_growth() + second.pss_growth()
        first.close()
        second.close()
        assert alone["pss_growth"] >= 0.9 * size, "the measure sees the weights"
        assert both <= 1.2 * alone["pss_growth"]


def is_mapped(path: Path) -> bool:
    return str(path) in Path("/proc/self/maps").read_text()


def copied_kib(path: Path) -> list[int]:
    """What this process has copies of, of the pages of a file, by mapping; empty if the file is not mapped."""
    return of_mappings(path, "Anonymous:")


def in_memory_kib(path: Path) -> int:
    return sum(of_mappings(path, "Rss:"))


def of_mappings(path: Path, what: str) -> list[int]:
    found, is_ours = list[int](), False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            is_ours = str(path) in line
        elif is_ours and first == what:
            found.append(int(rest[0]))
    return found


class Loader:
    """A process that loads a model, reads every weight, and stays."""

    PROGRAM = """
import sys
from pathlib import Path
import inference_svc
import mlx.core as mx
from mlx.utils import tree_flatten
from inference_svc.model.loading import load

def kib(file, name):
    return next(int(line.split()[1]) for line in Path(file).read_text().splitlines() if line.startswith(name))

mx.eval(mx.ones((64, 64)) @ mx.ones((64, 64)))
peak, pss = kib("/proc/self/status", "VmHWM"), kib("/proc/self/smaps_rollup", "Pss:")
loaded = load(Path(sys.argv[1]), "float32")
for _, value in tree_flatten(loaded.model.parameters()):
    mx.eval(value.sum())
for line in sys.stdin:
    print(kib("/proc/self/status", "VmHWM") - peak, kib("/proc/self/smaps_rollup", "Pss:") - pss, flush=True)
"""

    def __init__(self, model: Path) -> None:
        argv = [sys.executable, "-c", self.PROGRAM, str(model)]
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def measured(self) -> dict[str, int]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        peak, pss = map(int, self._process.stdout.readline().split())
        return {"peak_growth": peak << 10, "pss_growth": pss << 10}

    def pss_growth(self) -> int:
        return self.measured()["pss_growth"]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


class TestDamagedFiles:
    def test_a_file_that_is_cut_short_is_refused_by_name(self, tmp_path: Path) -> None:
        path = write_family(tmp_path, LLAMA31) / "model.safetensors"
        whole = path.read_bytes()
        for length in (0, 7, 8, 100, len(whole) // 2, len(whole) - 1):
            path.write_bytes(whole[:length])
            for copies in (False, True):
                with pytest.raises(FailedPrecondition, match=r"model\.safetensors is cut short or damaged") as found:
                    load(tmp_path, "float32", copies_weights=copies)
                assert found.value.field == "model"

    @pytest.mark.parametrize(
        "header",
        [
            "[]",
            "{",
            '{"a":1}',
            '{"a":{"dtype":"F32","shape":[1]}}',
            '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0]}}',
            '{"a":{"dtype":"F32","shape":[1],"data_offsets":[-4,0]}}',
            '{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}}',
            '{"a":{"dtype":"F32","shape":[1],"data_offsets":["0","4"]}}',
            '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,1e999]}}',
            '{"a":{"dtype":"F32","shape":[9],"data_offsets":[0,36]}}',
            "[" * 100_000,
        ],
    )
    def test_a_damaged_header_is_refused(self, header: str, tmp_path: Path) -> None:
        path = tmp_path / "model.safetensors"
        path.write_bytes(struct.pack("<Q", len(header)) + header.encode() + b"\0" * 8)
        with pytest.raises(FailedPrecondition, match="cut short or damaged"):
            weight_file(path)

    def test_a_header_longer_than_its_file_is_not_read(self, tmp_path: Path) -> None:
        path = tmp_path / "model.safetensors"
        path.write_bytes(struct.pack("<Q", 1 << 62) + b"{}")
        with pytest.raises(FailedPrecondition, match="its header claims"):
            weight_file(path)

    def test_empty_tensors_and_files_without_any_are_left_to_mlx(self, tmp_path: Path) -> None:
        mx.save_safetensors(str(tmp_path / "model-1.safetensors"), {"a": mx.zeros((0, 3)), "b": mx.ones((4,))})
        mx.save_safetensors(str(tmp_path / "model-2.safetensors"), {})
        found: Any = mx.load(str(tmp_path / "model-1.safetensors"))
        place_weights(weight_files(tmp_path), found)
        assert found["a"].shape == (0, 3)
        assert found["b"].tolist() == [1.0] * 4

    def test_a_name_of_two_files_is_left_to_mlx(self, tmp_path: Path) -> None:
        for number in (1, 2):
            path = tmp_path / f"model-{number}.safetensors"
            mx.save_safetensors(str(path), {"a": mx.full((4,), number)})
            shift(path, 0)
        found: Any = mx.load(str(tmp_path / "model-1.safetensors"))
        assert place_weights(weight_files(tmp_path), found).mapped_bytes == 0
        assert found["a"].tolist() == [1] * 4

    def test_a_file_that_was_replaced_since_is_left_to_mlx(self, tmp_path: Path) -> None:
        path = tmp_path / "model.safetensors"
        mx.save_safetensors(str(path), {"a": mx.ones((4,))})
        shift(path, 0)
        for content in (b"", path.read_bytes()):
            files, found = weight_files(tmp_path), mx.load(str(path))
            path.rename(tmp_path / "old")
            path.write_bytes(content)
            assert isinstance(found, dict)
            assert place_weights(files, found).mapped_bytes == 0
            (tmp_path / "old").replace(path)

    def test_files_replaced_between_loading_and_their_digest_are_refused(self, tmp_path: Path) -> None:
        directory = write_family(tmp_path / "one", LLAMA31)
        other = write_family(tmp_path / "two", LLAMA31, seed=9) / "model.safetensors"

        def replace_at(phase: str) -> None:
            if phase == "identity":
                other.replace(directory / "model.safetensors")

        def opened(begin_phase: Callable[[str], None]) -> str:
            model, _ = open_model(directory, {"cache_dir": tmp_path / "cache", "compute_type": "float32"}, begin_phase)
            return model.info.kv_identity.weights_digest

        before = opened(lambda _: None)
        with pytest.raises(FailedPrecondition, match="changed while they were read") as refused:
            opened(replace_at)
        assert refused.value.field == "model"
        assert opened(lambda _: None) != before

    @pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
    def test_a_text_replaced_behind_its_reading_is_refused(self, name: str, tmp_path: Path) -> None:
        """Else memories of the old one would be kept, and gone on with, under the new one's name."""
        directory, cache_dir = write_family(tmp_path / "one", LLAMA31), tmp_path / "cache"
        text, other = directory / name, tmp_path / name

        def load_and_replace(*given: Any, **options: Any) -> LoadedModel:
            loaded = load(*given, **options)
            loaded.reading.result(60)
            other.replace(text)
            return loaded

        other.write_text(text.read_text() + " ")
        with pytest.raises(FailedPrecondition, match="changed while they were read"):
            open_model(directory, {"cache_dir": cache_dir}, load=load_and_replace)
        open_model(directory, {"cache_dir": cache_dir})

    def test_a_file_that_is_cut_short_while_mlx_reads_it_is_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = write_family(tmp_path, LLAMA31) / "model.safetensors"

        def place_and_cut(*given: Any, **options: Any) -> Placement:
            placed = place_weights(*given, **options)
            os.truncate(path, path.stat().st_size // 2)
            return placed

        monkeypatch.setattr(loading, "place_weights", place_and_cut)
        with pytest.raises(FailedPrecondition, match="Unable to read from file") as refused:
            load(tmp_path, "float32", copies_weights=True)
        assert refused.value.reason == "MODEL_NOT_LOADABLE"

    def test_a_model_whose_file_has_no_tensors_is_refused(self, tmp_path: Path) -> None:
        path = write_family(tmp_path, LLAMA31) / "model.safetensors"
        mx.save_safetensors(str(path), {})
        for copies in (False, True):
            with pytest.raises(FailedPrecondition, match="mlx-lm cannot load it"):
                load(tmp_path, "float32", copies_weights=copies)


def absent() -> Extension:
    raise NoExtension("there is no compiler")


class TestWithoutTheExtension:
    def test_mlx_reads_the_weights_and_the_reason_is_kept(self, tmp_path: Path) -> None:
        path = tmp_path / "model.safetensors"
        mx.save_safetensors(str(path), {"a": mx.ones((4,))})
        found: Any = mx.load(str(path))
        placed = place_weights(weight_files(tmp_path), found, get_extension=absent)
        assert found["a"].tolist() == [1.0] * 4
        assert placed.in_words == "0.00 GB copied (there is no compiler)"

    @pytest.mark.long(2)
    def test_a_process_that_finds_no_compiler_loads_the_same_model(self, tmp_path: Path) -> None:
        """A real process, with an empty PATH and a home in which nothing was compiled."""
        write_family(tmp_path / "model", LLAMA31)
        program = (
            "import sys; from pathlib import Path; import inference_svc; from inference_svc.model.loading import load;"
            "print(load(Path(sys.argv[1]), 'float32').placement.in_words)"
        )
        argv = [sys.executable, "-c", program, str(tmp_path / "model")]
        environment = {**os.environ, "PATH": str(tmp_path), "HOME": str(tmp_path)}
        answer = subprocess.run(argv, capture_output=True, text=True, check=True, env=environment)
        assert "copied (there is no C++ compiler" in answer.stdout
        assert not (tmp_path / ".cache").exists()

    @pytest.mark.parametrize(
        ("spoil", "why"),
        [
            (lambda kept: None, "this user has no home"),
            (lambda kept: (kept.mkdir(), kept.chmod(0o777), kept)[2], "may be written by others"),
            (lambda kept: (kept.touch(), kept / "below")[1], "cannot be kept"),
        ],
        ids=["no home", "shared folder", "no folder"],
    )
    def test_it_is_kept_in_a_folder_of_this_user_or_not_at_all(
        self, spoil: Callable[[Path], Path | None], why: str, tmp_path: Path
    ) -> None:
        with pytest.raises(NoExtension, match=why):
            extension(spoil(tmp_path / "kept"), compilers=("true",))

    def test_on_a_mac_without_apples_tools_no_compiler_is_run(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """There /usr/bin/c++ opens a window; another compiler may be first in PATH."""
        ran, asked = Path(tmp_path / "ran"), f"{extension.__module__}._SELECT"
        monkeypatch.setattr(sys, "platform", "darwin")
        monkeypatch.setattr(f"{extension.__module__}._APPLES", str(tmp_path))
        window = tmp_path / "window"
        window.write_text(f"#!/bin/sh\ntouch {ran}\nexit 1\n")
        window.chmod(0o700)
        for has_tools in (("false",), ("no such program",)):
            monkeypatch.setattr(asked, has_tools)
            with pytest.raises(NoExtension, match="xcode-select --install"):
                extension(tmp_path / "kept", compilers=(str(window),))
            assert not ran.exists()
        monkeypatch.setattr(asked, ("true",))
        with pytest.raises(NoExtension, match="window does not compile it"):
            extension(tmp_path / "kept", compilers=(str(window),))
        monkeypatch.setattr(asked, ("false",))
        with pytest.raises(NoExtension, match="false does not compile it"):
            extension(tmp_path / "kept", compilers=("false",))

    def test_a_compiler_that_fails_is_reported_and_leaves_nothing(self, tmp_path: Path) -> None:
        with pytest.raises(NoExtension, match="false does not compile it"):
            extension(tmp_path, compilers=("false",))
        assert list(tmp_path.iterdir()) == []

    def test_a_file_that_is_no_library_is_no_extension(self, tmp_path: Path) -> None:
        with pytest.raises(NoExtension, match="does not load it"):
            extension(tmp_path, compilers=("true",))  # leaves an empty file


@needs_compiler
@pytest.mark.long(5)
def test_a_kept_file_that_a_crash_cut_short_is_made_again(tmp_path: Path) -> None:
    """Loaded, it ended each start of an engine by SIGBUS."""
    program = (
        "import sys; from pathlib import Path; from inference_svc.model.weights import extension as module;"
        "module._WAIT_S = None; module.extension(Path(sys.argv[1])); print('loaded')"
    )
    argv = [sys.executable, "-c", program, str(tmp_path)]
    for _ in range(2):
        loaded = subprocess.run(argv, capture_output=True, text=True, check=False)
        assert (loaded.returncode, loaded.stdout) == (0, "loaded\n"), loaded.stderr
        for kept in tmp_path.iterdir():
            os.truncate(kept, kept.stat().st_size // 2)


@needs_compiler
@pytest.mark.long(3)
def test_threads_that_compile_at_once_leave_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{extension.__module__}._WAIT_S", None)  # a busy compiler takes longer
    found: list[Extension] = []
    threads = [threading.Thread(target=lambda: found.append(extension(tmp_path))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2
    assert [path.suffix for path in tmp_path.iterdir()] == [".so"]
