"""Steps that give a turn several tokens: by drafts, and by windows of masks."""
