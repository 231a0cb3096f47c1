"""Allocates the large buffers that files are written from and read into."""

import ctypes
import mmap

HUGE_PAGE_NBYTES = 2 << 20


def allocate(nbytes: int, *, stays: bool = True) -> memoryview:
    """Return zeroed memory that begins at a huge page, for O_DIRECT wants aligned.

    Parameters
    ----------
    nbytes : int
        Its length, in bytes.
    stays : bool
        Whether it may be used in a process that was forked meanwhile.

    Raises
    ------
    MemoryError
        There is no room for it.

    Notes
    -----
    The memory is private: Linux gives huge pages to shared memory only where the
    system was told so. Measured in a virtual machine, direct writes out of huge pages
    were a fifth faster, and reads into fresh ones twice as fast.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        memory = mmap.mmap(-1, nbytes + HUGE_PAGE_NBYTES, flags)
    except OSError as error:
        raise MemoryError(f"no memory for {nbytes} bytes") from error
    start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % HUGE_PAGE_NBYTES
    in_huge_pages = nbytes - nbytes % HUGE_PAGE_NBYTES
    # Not the rest, of which a huge page would hold more than was asked for.
    if in_huge_pages and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE, start, in_huge_pages)
    if not stays and hasattr(mmap, "MADV_DONTFORK"):
        # A fork while the kernel fills it would part it from what the kernel fills.
        memory.madvise(mmap.MADV_DONTFORK)
    return memoryview(memory)[start : start + nbytes]
