"""What is stored and sent, byte for byte: digests, manifests, block files, frames, archives."""
