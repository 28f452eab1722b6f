"""Runs: their folders, and tasks that do not depend on each other, done here, by worker processes or a cluster."""
