"""Run configs: sections, loading, and what is checked before a run."""
