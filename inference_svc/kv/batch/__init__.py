"""The KV of several sequences that are decoded together. The engine imports `decode_batch`."""
