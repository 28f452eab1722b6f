"""The optimisation attack: one loop, of which the papers' attacks are settings."""
