"""Decides who does what; pure functions: records in, records out, no I/O, no MPI."""
