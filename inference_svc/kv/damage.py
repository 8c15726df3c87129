"""A tensor file that is refused: which one, as a value for planning without it."""

from kvasir.errors import DataLoss


class DamagedFile(DataLoss):
    """Either the state of `state` tokens, or the file `blob`, counted among the given files of its group."""

    def __init__(self, what: str, *, blob: int = 0, window: int = 0, state: int = 0) -> None:
        """`window`: that of the group; 0: the layers that keep all tokens."""
        self.blob, self.window, self.state = blob, window, state
        if state:
            super().__init__(f"state file of {state} tokens: {what}", metadata={"state": str(state)})
            return
        place = {"blob": str(blob), **({"window": str(window)} if window else {})}
        super().__init__(f"tensor file {blob}{f' of window {window}' if window else ''}: {what}", metadata=place)
