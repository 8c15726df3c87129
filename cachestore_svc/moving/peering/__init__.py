"""The other stores: clients of them, and what each may do here."""
