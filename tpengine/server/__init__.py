"""Servers of the engine: gRPC, and what all protocols share."""
