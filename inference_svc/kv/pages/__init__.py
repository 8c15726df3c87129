"""Pages of KV: who holds each, which sequence has which, and the arrays that they lie in."""
