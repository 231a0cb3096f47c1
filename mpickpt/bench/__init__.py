"""Measures the library against the bounds that the machine sets; uses all below."""
