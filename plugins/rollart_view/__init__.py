"""What a run directory shows: pictures, and trajectories for other tools."""
