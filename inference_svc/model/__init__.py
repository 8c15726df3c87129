"""A model and everything that belongs to it: loading, identity, tokenizer, KV policy. `engine` and above import it."""
