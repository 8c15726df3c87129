"""The list of mutants is that of today's code: each finds, once, the lines that it breaks."""

import pytest

from tests.cachestore.core.mutants import MUTANTS, ROOT, Mutant, file_of


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.what)
def test_a_mutant_finds_the_code_that_it_breaks(mutant: Mutant) -> None:
    file_of(mutant, ROOT)
