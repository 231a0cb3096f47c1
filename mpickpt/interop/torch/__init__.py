"""Puts PyTorch's objects into state trees, and fills them again."""
