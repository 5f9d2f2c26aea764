"""Routing of generation requests to inference engines."""
