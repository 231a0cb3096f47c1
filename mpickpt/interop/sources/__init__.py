"""Reads files of other systems: zip files of torch, and pickles without running them."""
