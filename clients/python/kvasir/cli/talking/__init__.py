"""`kvasir chat`: what is typed, one turn, and the conversation."""
