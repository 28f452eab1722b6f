"""Attackers of a run: the table that chooses them, and the facts of updates and defences that it looks at."""
