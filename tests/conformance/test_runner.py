"""The runner itself: how one language ends is not another's matter."""

from typing import NoReturn

import pytest

from tests.conformance import __main__ as runner
from tests.conformance.programs import LANGUAGES, Language


def _did_not_raise(language: Language) -> NoReturn:
    pytest.fail(f"DID NOT RAISE {language.name}")


def _answers_nonsense(language: Language) -> NoReturn:
    raise KeyError(language.name)


@pytest.mark.parametrize("ends", [_did_not_raise, _answers_nonsense])
def test_however_a_language_fails_the_next_has_its_turn(
    ends: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = (language.name for language in LANGUAGES[:2])
    monkeypatch.setattr("sys.argv", ["conformance", "--no-build", first, second])
    monkeypatch.setattr(runner, "missing_tools", lambda language: [])
    monkeypatch.setattr(runner, "conform", ends)
    assert runner.main() == 1
    told = capsys.readouterr().out
    assert f"{first}: FAILED" in told
    assert f"{second}: FAILED" in told
