"""Puts JAX's arrays into state trees, and makes them again."""
