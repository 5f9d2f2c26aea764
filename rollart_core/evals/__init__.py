"""Evaluations: suites of environments, models beside baselines, and a card of what came out."""
