"""The life of a request, on the event loop. Start at `turn_flow`. Imported by `edge` and the composition root."""
