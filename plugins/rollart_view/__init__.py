"""Read run directories: plots, diagnoses, and exports of trajectories for other tools."""
