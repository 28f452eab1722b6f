"""Tasks that do not depend on one another: done here, by worker processes, or by a cluster, with the same results."""
