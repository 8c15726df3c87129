"""Every list of mutants of this repository."""

from collections.abc import Mapping

from tests.cachestore.core.mutants import STORE
from tests.cachestore.moving.mutants import MOVES
from tests.cachestore.sealing.mutants import SEALING
from tests.cachestore.service.mutants import AUDIT, UPKEEP
from tests.campaigns.hammer.mutants import HAMMER
from tests.campaigns.mutation.mutant import Suite
from tests.inference.engine.mutants import ENGINE
from tests.inference.kv.mutants import KV
from tests.inference.scheduling.scheduler_mutants import SCHEDULER
from tests.kvasir.mutants import SDK

SUITES: Mapping[str, Suite] = {
    suite.name: suite for suite in (STORE, MOVES, SEALING, UPKEEP, AUDIT, ENGINE, SCHEDULER, KV, HAMMER, SDK)
}
