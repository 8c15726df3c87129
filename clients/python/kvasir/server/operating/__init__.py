"""What a service shows its operators: logs, audit, numbers, traces, and how it is."""
