"""The module that also runs in the Python of an inference server, which may not have RollArt."""
