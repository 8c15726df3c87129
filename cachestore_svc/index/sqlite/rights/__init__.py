"""Who may extend an agent's memory: the store that owns it (owners), and the engine with the lease (leases)."""
