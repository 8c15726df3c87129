"""An agent's line under this engine's KV identity: who may extend it, and how memories become its versions.

`line_states` decides what may be written and which hot memory may be used; `line` owns what is known of one line.
"""
