"""An importer whose source is a text, for tests of the command around importers."""

import numpy as np

import mpickpt
from mpickpt import ManifestError, Sharded, StreamedArray


class Elements(StreamedArray):
    """Streamed from nowhere: as many numbers as a source says."""

    def __init__(self, count, progress):
        self.shape = (count,)
        self.dtype = np.dtype("f8")
        self._progress = progress

    def read(self, box):
        elements = np.arange(box[0].start, box[0].stop, dtype="f8")
        if self._progress is not None:
            self._progress(elements.nbytes, self.nbytes)
        return elements


def dcp(source, target, *, step, comm, overwrite, skip, progress):
    word, _, number = source.read_text().partition(" ")
    if word == "broken":
        raise ManifestError(f"{source} asks for os.system")
    if word == "bug" and (comm is None or comm.rank == comm.size - 1):
        raise RuntimeError("a fault of ours")
    count, rank = int(number), 0 if comm is None else comm.rank
    pieces = [((rank * count,), Elements(count, progress))]
    size = 1 if comm is None else comm.size
    state = {
        "x": Sharded.pieces(pieces, global_shape=(count * size,)),
        "skip": list(skip),
    }
    return mpickpt.save_sharded(
        state, target, step=4 if step is None else step, comm=comm, overwrite=overwrite
    )


def deepspeed(source, target, *, tag, **options):
    return dcp(source, target, skip=[tag], **options)


def nemo(source, target, *, iteration, **options):
    return dcp(source, target, **options | {"step": iteration})
