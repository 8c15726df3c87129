"""The options of the store, the engine, the gateway and `kvasir up`: one table for each, and how a value is found."""
