"""Questions of a file, each answered in one turn."""
