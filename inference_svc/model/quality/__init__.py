"""What a KV policy costs a model: material to read and ask, its measurement under each rung, and the gate."""
