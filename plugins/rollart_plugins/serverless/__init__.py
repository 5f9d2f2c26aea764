"""Built-in serverless."""
