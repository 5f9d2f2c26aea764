"""The built-in sandboxes: one agent and one protocol behind walls of different strength."""
