"""A Flower app whose clients learn from sentences and protect what they send."""
