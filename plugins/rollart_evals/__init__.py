"""Evaluations: suites of environments, models and baselines, and a card with the results."""
