"""How the embedded model comes to be: a small world, a grammar about it, the training."""
