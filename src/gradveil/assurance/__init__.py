"""Evidence for people who sign: audits of a client's epsilon, and the assurance statement of a run."""
