"""The client: one gradient, per-example gradients, local steps, public messages."""

from gradveil.client.client import Client
from gradveil.client.gradient import cross_entropy
from gradveil.client.local import Local
from gradveil.client.messages import announced, proposer, speakers

__all__ = ["Client", "Local", "announced", "cross_entropy", "proposer", "speakers"]
