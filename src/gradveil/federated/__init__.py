"""Rounds of federated learning in one process, and what travels over the wire."""
