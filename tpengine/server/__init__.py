"""The gRPC server and its client."""
