"""Messages of a user, as clients send them."""


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def by_user(text: str) -> list[dict[str, str]]:
    """The messages of a turn that are one message."""
    return [user(text)]
