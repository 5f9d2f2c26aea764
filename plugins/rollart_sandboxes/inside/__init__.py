"""Code that runs inside a sandbox: sent over its stdin at the start, so no image contains it."""
