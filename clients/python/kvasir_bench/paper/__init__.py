"""The tables of the papers that the system is built from: published figures, measured rows beside them, their forms."""
