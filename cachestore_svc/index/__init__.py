"""The store's knowledge of agents, versions and blobs: `catalog` is the port, `sqlite` the one implementation."""
