"""Provide the kind ``endpoint``: a model behind a server with OpenAI's interface."""
