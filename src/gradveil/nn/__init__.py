"""Models with explicit randomness, and the surgeries that make a user's model auditable."""
