"""The HTTP server: OpenAI's interface."""
