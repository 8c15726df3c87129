"""The formats of stored and sent data, byte for byte: digests, manifests, block files, frames, archives."""
