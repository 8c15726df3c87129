"""The input of a turn: from the wire to checked values."""
