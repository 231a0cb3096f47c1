"""Reads files of other systems: torch's zip files, and pickles, running nothing."""
