"""The store below gRPC: its operations on blobs, agents, leases and owners as methods that block."""
