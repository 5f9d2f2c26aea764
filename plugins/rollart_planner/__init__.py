"""Planning: what runs on which hardware, why, and how fast that should be."""
