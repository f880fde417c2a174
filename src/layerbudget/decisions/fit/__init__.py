"""Formats of the weights and of the cache under one memory."""
