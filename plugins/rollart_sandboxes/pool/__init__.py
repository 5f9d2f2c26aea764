"""Sandboxes for environments: admission, pooling, the ledger, and garbage collection."""
