"""For operators: logs, audit, numbers, traces, health."""
