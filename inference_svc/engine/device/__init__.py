"""A device that fails: which errors mean that, and the steps that the engine takes then."""
