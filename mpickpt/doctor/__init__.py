"""`mpickpt doctor`: looks at a place for checkpoints, alone and with all ranks."""
