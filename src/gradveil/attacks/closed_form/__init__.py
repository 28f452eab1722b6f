"""Attacks that solve equations instead of searching."""
