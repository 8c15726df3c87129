"""How two stores come to know each other: codes, the exchange under a code, identities, and the file of peers."""
