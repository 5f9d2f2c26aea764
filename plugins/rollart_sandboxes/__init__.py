"""The built-in sandboxes: one agent and one protocol with several kinds of isolation."""
