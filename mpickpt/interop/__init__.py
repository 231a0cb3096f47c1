"""Neighbours: the objects of frameworks in, their checkpoints in, safetensors out."""
