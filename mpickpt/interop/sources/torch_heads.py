"""Reads what many files of torch.save say about themselves, shared out over ranks."""

from collections.abc import Sequence
from pathlib import Path
from threading import Event

import msgspec

from mpickpt.interop.sources.file import OpenFiles, SourceFile
from mpickpt.interop.sources.torch_file import TorchFile
from mpickpt.interop.sources.torch_head import TorchHead, read_head
from mpickpt.parallel.collective import Conversation, Steps

PHASE = "read what the files say"

_Heads = dict[str, TorchHead]


def gather_files(
    talk: Conversation, root: Path, names: Sequence[str]
) -> Steps[dict[str, TorchFile]]:
    """Return the files by name on every rank, each of them looked into by one rank.

    Parameters
    ----------
    talk : Conversation
        Of the ranks that call.
    root : Path
        The directory that the names are relative to.
    names : sequence of str
        The same on all ranks.

    Raises
    ------
    IncompleteCheckpointError, CorruptShardError, ManifestError
        As `read_head`; the same on all ranks.
    """

    def read(cancelled: Event) -> bytes:
        own: _Heads = {}
        for name in names[talk.rank :: talk.size]:
            if cancelled.is_set():
                break
            own[name] = _head(root, name)
        return msgspec.msgpack.encode(own)

    own = yield from talk.work(read, PHASE)
    parts = yield from talk.gather(own, PHASE)
    joined = None if parts is None else msgspec.msgpack.encode(parts)
    everything = yield from talk.bcast(joined, PHASE)
    heads: _Heads = {}
    for part in msgspec.msgpack.decode(everything, type=list[bytes]):
        heads |= msgspec.msgpack.decode(part, type=_Heads)
    opened = OpenFiles()
    return {
        name: TorchFile(SourceFile(root, name, opened=opened), heads[name])
        for name in names
    }


def _head(root: Path, name: str) -> TorchHead:
    source = SourceFile(root, name)
    try:
        return read_head(source)
    finally:
        source.close()
