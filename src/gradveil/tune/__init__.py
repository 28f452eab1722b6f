"""Searches for the settings of a defence that suit a model and its data."""
