"""A Flower app whose clients protect what they send."""
