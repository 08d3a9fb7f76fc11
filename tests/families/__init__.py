"""Every model family and variant against transformers."""
