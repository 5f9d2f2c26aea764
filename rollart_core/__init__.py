"""RollArt: a plugin-based gym platform for training LLM agents with reinforcement learning."""
