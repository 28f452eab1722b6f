"""The client: one gradient, per-example gradients, local steps."""

from gradveil.client.client import Client
from gradveil.client.gradient import cross_entropy
from gradveil.client.local import Local

__all__ = ["Client", "Local", "cross_entropy"]
