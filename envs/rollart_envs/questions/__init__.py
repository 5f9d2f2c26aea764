"""Questions from a file, each answered in one turn."""
