"""Measurements, run as scripts or modules. A package, since other projects install one of this name."""
