"""The making of trajectories: environment, conversation, engine, one episode at a time."""
