"""Every table of mutants of this repository."""

from collections.abc import Mapping

from tests.campaigns.hammer.asking import ask_the_hammer
from tests.campaigns.mutation.mutant import Suite

_PACKAGES = {
    "cachestore_svc": ("store", "moves", "sealing", "upkeep"),
    "inference_svc": ("engine", "scheduler", "kv", "drafts", "masks"),
    "clients/python/kvasir": ("audit", "sdk"),
}
_ASKED = [Suite(name, package) for package, names in _PACKAGES.items() for name in names]
SUITES: Mapping[str, Suite] = {
    suite.name: suite for suite in (*_ASKED, Suite("hammer", "inference_svc", ask=ask_the_hammer))
}
