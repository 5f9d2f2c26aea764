"""A plain function that is a reward."""


def is_short(completion: str) -> float:
    """Return a number that falls with the length of the answer."""
    return 1 / (1 + len(completion))
