"""Diagnose the learning of a run from its journal: `rollart diagnose`."""
