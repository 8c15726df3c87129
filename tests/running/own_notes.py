"""Stores under test note their last runs in a directory of the tests, not in the home of the person who tests."""

import os
import tempfile

from tests.running import in_memory

_NAME = "KVASIR_STORE_LAST_RUNS_DIR"
if _NAME not in os.environ:  # of the process that began the tests
    DIRECTORY = tempfile.TemporaryDirectory(prefix="kvasir-last-runs-", dir=in_memory.directory())
    os.environ[_NAME] = DIRECTORY.name
