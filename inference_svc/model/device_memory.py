"""How many bytes MLX holds in this process, and the most that it has held."""

import mlx.core as mx


def active_bytes() -> int:
    """Bytes of live arrays."""
    return int(mx.get_active_memory())


def peak_bytes() -> int:
    """The most bytes of live arrays since `restart_peak`."""
    return int(mx.get_peak_memory())


def restart_peak() -> int:
    """Give free buffers back and count the peak anew; returns the bytes of live arrays."""
    mx.clear_cache()
    mx.reset_peak_memory()
    return active_bytes()
