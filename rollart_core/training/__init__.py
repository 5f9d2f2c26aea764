"""How training is controlled: schedules, clipping, the guard. Torch-free."""
