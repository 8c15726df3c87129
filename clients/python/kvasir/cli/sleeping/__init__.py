"""`kvasir agents sleep | wake`, and how soon each agent's KV is at hand."""
