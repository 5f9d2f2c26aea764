"""What went wrong in the learning of a run, from its journal: `rollart diagnose`."""
