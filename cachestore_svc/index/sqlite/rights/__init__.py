"""The right to extend an agent's memory: of the store that owns it (owners), and of the engine with the lease
(leases)."""
