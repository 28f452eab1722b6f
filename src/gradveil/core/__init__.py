"""The vocabulary: named noise, transforms, trees of tensors, and errors that name a remedy."""
