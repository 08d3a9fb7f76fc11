"""What several test rooms share: small random models, the oracle, a log of the steps."""
