"""What is on disk: names, records, boxes, digests, types; no I/O, no MPI."""
