"""What a KV policy costs a model: material to read and ask, a measurement under each rung, and the gate."""
