"""What the store knows of agents, versions and blobs, as rows."""
