"""An agent's line under this engine's KV identity: `line_states` decides, `line` owns what is known of one."""
