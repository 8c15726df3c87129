"""`kvasir bench memory`: the same scenarios under several ways to remember, and what may be claimed of them."""
