"""Pure text and tokens: conversations, replies, stop strings, matching. No MLX; imports no other room."""
