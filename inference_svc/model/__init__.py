"""A model and what belongs to it: loading, identity, tokenizer, KV policy. Imported by `engine` and above."""
