"""A text of one's own: what is refused, which windows are read, intervals, and the layers that a budget keeps exact."""

import statistics
from pathlib import Path
from types import SimpleNamespace

import pytest
from kvasir.errors import InvalidArgument, KvasirError, NotFound
from kvasir_bench.quality import given
from kvasir_bench.quality.given import read_text, windows_of
from kvasir_bench.quality.mixing import LayerCost, interval, kept_exact, suggested, with_intervals

from inference_svc.model.quality.findings import Findings, TextMeans

FILE = Path("notes.txt")


def letters(begin: int | None = None) -> SimpleNamespace:
    """A tokenizer with a token for each character, which begins a text with `begin`."""

    def encode(text: str, add_special_tokens: bool = True) -> list[int]:
        return [*([begin] if begin is not None and add_special_tokens else []), *map(ord, text)]

    return SimpleNamespace(encode=encode, bos_token_id=begin)


def found(name: str, bytes_per_token: int, *kl: float) -> Findings:
    """Findings with so much KL in each text."""
    made = Findings(name, bytes_per_token)
    for each in kl:
        made.add_text(positions=10, kl_sum=10 * each, kl_worst=each, agreed=9, surprise_sum=10.0 + each)
    return made


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"caf\xe9 " * 2000, "is not UTF-8 at byte 3"),
        (b"x" * ((16 << 20) + 1), "is larger than 16 MiB"),
        (None, "cannot be read"),
    ],
    ids=["latin-1", "too long", "missing"],
)
def test_a_text_that_cannot_be_read_is_refused_with_its_file(content: bytes | None, said: str, tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(KvasirError, match=said) as refused:
        read_text(file)
    assert isinstance(refused.value, NotFound if content is None else InvalidArgument)
    assert refused.value.field == "text"
    assert str(file) in refused.value.message
    assert "1,024 tokens" in refused.value.message


def test_a_text_that_is_too_short_is_refused_with_the_length_that_is_expected() -> None:
    with pytest.raises(InvalidArgument, match=r"notes.txt has 1,023 tokens.* at least 1,024 tokens, about 1,024 char"):
        windows_of(FILE, "x" * 1023, letters(), 1024)
    with pytest.raises(InvalidArgument, match="0 tokens"):
        windows_of(FILE, "", letters(), 1024)
    assert len(windows_of(FILE, "x" * 1024, letters(), 1024)) == given.WINDOWS


def test_windows_are_spread_over_the_whole_text_and_begin_as_texts_do(tmp_path: Path) -> None:
    text = "".join(chr(500 + place) for place in range(16_000))
    (tmp_path / "marked").write_text(text, encoding="utf-8-sig")
    assert read_text(tmp_path / "marked") == text
    windows = windows_of(FILE, text, letters(begin=1), 100)
    assert [window.ids[1] for window in windows] == [500 + 1000 * number for number in range(16)]
    assert {(len(window.ids), window.ids[0], window.scored_from) for window in windows} == {(101, 1, 2)}
    whole = windows_of(FILE, text, letters(), 4096)
    assert [token for window in whole for token in window.ids] == [ord(character) for character in text]
    assert whole[0].scored_from == 1


def test_an_interval_is_that_of_students_t() -> None:
    """Sixteen numbers 1 to 16: mean 8.5, standard deviation 4.761, t 2.131."""
    low, high = interval(range(1, 17))
    assert (low, high) == (pytest.approx(5.9635, abs=1e-3), pytest.approx(11.0365, abs=1e-3))
    assert interval([3.0] * 8) == (3.0, 3.0)


def test_what_a_perplexity_rises_by_is_compared_window_by_window() -> None:
    """The windows' own perplexities differ far more than the policy changes them."""
    surprises = [float(number) for number in range(16)]
    exact, other = Findings("exact", 1), Findings("q4", 1)
    for surprise in surprises:
        exact.texts.append(TextMeans(0.0, 1.0, surprise))
        other.texts.append(TextMeans(0.1, 0.9, surprise + 0.01))
    shown = with_intervals(other, exact)
    assert statistics.stdev(surprises) > 4
    assert [shown[f"perplexity_rise{end}"] for end in ("_low", "", "_high")] == pytest.approx([0.01005] * 3, abs=1e-5)


def test_layers_that_cost_most_a_byte_stay_exact_as_far_as_the_bytes_reach() -> None:
    kl = {0: 1.0, 1: 9.0, 2: 4.0, 3: 8.0}
    costs = [LayerCost(layer, 400 if layer == 3 else 100, found("", 1, *[cost] * 8)) for layer, cost in kl.items()]
    assert kept_exact(costs, 99) == ()
    assert kept_exact(costs, 100) == (1,)
    assert kept_exact(costs, 250) == (1, 2), "layer 3 costs more, but less a byte"
    assert kept_exact(costs, 399) == (0, 1, 2)
    assert kept_exact(costs, 700) == (0, 1, 2, 3)


def test_what_is_suggested_is_within_the_budget_and_better_by_more_than_chance() -> None:
    q4 = found("q4", 100, *[0.4] * 16)
    mixed = found("mixed", 200, *[0.3, 0.1] * 8)
    k8v4 = found("k8v4", 200, *[0.1, 0.2] * 8)
    fp = found("fp", 400, *[0.0] * 16)
    best, why = suggested([q4, mixed, k8v4, fp], 200)
    assert best is mixed, "by the windows that chose no layer"
    assert why.endswith("mixed 1.0e-01, k8v4 2.0e-01, q4 4.0e-01")
    assert suggested([q4, k8v4, fp], 200)[0] is k8v4
    assert suggested([q4, k8v4, fp], 199)[0] is q4
    uncertain = found("uncertain", 200, *[0.0, 0.9, 0.0, 0.0] * 4)
    best, why = suggested([found("cheap", 100, *[0.5] * 16), uncertain], 200)
    assert best.name == "cheap"
    assert "uncertain is not nearer to exact KV than cheap by more than chance" in why
