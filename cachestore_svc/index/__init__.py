"""The store's knowledge of agents, versions and blobs: `catalog` is the door to `sqlite` and `postgres`."""
