"""Writes safetensors files, as model hubs lay them out."""
