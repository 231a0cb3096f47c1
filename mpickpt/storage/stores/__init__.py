"""Stores: one interface to directories, S3, Google Cloud Storage and the rest.

A store holds files under relative names. `opening.open_store` gives the one for a URL;
the client libraries are imported there, when they are used, and nowhere else. Knows
neither MPI nor HDF5, nor what the files mean.
"""
