"""Gradients of a client's loss: plainly by autograd, and for many clients in one sweep."""
