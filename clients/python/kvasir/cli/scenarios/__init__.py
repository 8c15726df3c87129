"""`kvasir scenario …`: `commands` is always there; what it calls needs the extra `orchestrator`."""
