"""A reward function: `reward=my_rewards:accuracy` if this file is in the current folder."""


def accuracy(completion, answer, **columns):
    """Return whether the policy's message is the answer of the row."""
    return completion.strip() == answer
