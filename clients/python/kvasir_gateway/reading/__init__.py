"""How far a request may differ from what the gateway knows: what of it is ignored, left out, or refused."""
