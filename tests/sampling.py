"""How much of a sampled property one run looks at: `make test` a part, `make campaigns` the whole."""

import os

IS_WHOLE = bool(os.environ.get("KVASIR_WHOLE"))


def sampled(part: int, *, of: int) -> int:
    """Cases of a run: so many of those that a campaign tries (DESIGN §12)."""
    return of if IS_WHOLE else part
