"""What a run directory shows: pictures, diagnoses, and trajectories for other tools."""
