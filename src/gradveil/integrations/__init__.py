"""Gradveil's defences inside other people's federated learning frameworks."""
