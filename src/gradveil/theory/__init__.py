"""Bounds and privacy accounting: what is known without running an attack."""
