"""The least an environment needs: guess a number from 1 to 20, told only higher or lower."""

import random

import gymnasium

from rollart_core.spaces import Text


class GuessNumber(gymnasium.Env[str, str]):
    """Reward 1 for the right number within six guesses."""

    observation_space = Text()
    action_space = Text()

    def reset(self, *, seed=None, options=None):
        """Think of a number; those that 5 divides are kept for the split `test`."""
        super().reset(seed=seed)
        options = options or {}
        is_test = options.get("split") == "test"
        numbers = [n for n in range(1, 21) if (n % 5 == 0) == is_test]
        self.number = random.Random(str(options.get("task", seed))).choice(numbers)
        self.guesses, self.low, self.high = 0, 1, 20
        return "Guess my number, 1 to 20.", {"success": False}

    def step(self, action):
        """Compare a guess; what is no number counts as a guess too."""
        self.guesses += 1
        guess = int(action) if action.strip().isascii() and action.strip().isdigit() else 0
        if guess == self.number:
            return "Yes!", 1.0, True, False, {"success": True}
        if guess < self.number:
            self.low = max(self.low, guess + 1)
        else:
            self.high = min(self.high, guess - 1)
        page = "higher" if guess < self.number else "lower"
        return page, 0.0, False, self.guesses >= 6, {"success": False}

    def oracle(self):
        """Halve what is left."""
        return str((self.low + self.high) // 2)
