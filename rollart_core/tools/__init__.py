"""Tools that an environment offers: what they are, how they are called, where they come from."""
