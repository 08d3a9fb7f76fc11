"""The protocol, and the stubs made from it."""
