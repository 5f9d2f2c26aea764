"""Planning: choose the hardware for each worker of a run, and estimate the rates."""
