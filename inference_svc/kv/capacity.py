"""How many rows a sequence's buffers get: arithmetic that admission does before anything is allocated."""

STEP_ROWS = 256


def capacity_rows(rows: int) -> int:
    """Rows of a buffer that must hold `rows`: whole steps, and from 8,192 rows on a 32nd to spare.

    Growing copies the buffer, so long ones grow in longer steps; the spare rows stay below what 16-bit scales save.
    """
    return _whole_steps(rows) + (rows // 32) // STEP_ROWS * STEP_ROWS


def _whole_steps(rows: int) -> int:
    return -(-rows // STEP_ROWS) * STEP_ROWS
