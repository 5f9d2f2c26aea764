"""The parts of software-repair environments: tasks, patches, logs, grading, tools."""
