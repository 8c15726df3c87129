"""How things are: the last hour, live turns, the engine and its models."""
