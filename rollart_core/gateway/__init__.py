"""The HTTP endpoint that agent programs send their requests to."""
