"""Reads checkpoints of DeepSpeed; needs neither torch nor DeepSpeed."""
