"""OpenAI-compatible servers as seen by a client: one connection, its retries, and judges on it."""
