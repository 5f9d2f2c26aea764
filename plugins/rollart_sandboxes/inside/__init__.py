"""What runs inside a box: sent over its stdin as it starts, so that no image has to hold it."""
