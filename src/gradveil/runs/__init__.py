"""Runs: tasks that do not depend on each other, done in this process, by worker processes or a cluster."""
