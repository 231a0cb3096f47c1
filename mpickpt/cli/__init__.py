"""The command line, one file a command; looks at checkpoints on one process."""
