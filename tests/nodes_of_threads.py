"""Ranks that are threads take themselves for ranks of several nodes.

Each node has a directory of its own, by its name; nothing but the name is forged, so
no privilege is needed.
"""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mpickpt.parallel import survey
from mpickpt.storage import node_disk


class NodesOfThreads:
    """Says on which node each rank is.

    Parameters
    ----------
    monkeypatch : MonkeyPatch
        Undoes it after the test.
    folder : Path
        Holds a directory for each node.
    """

    def __init__(self, monkeypatch: Any, folder: Path) -> None:
        self._own = threading.local()
        self._folder = folder
        for module in (node_disk, survey):
            monkeypatch.setattr(module, "node_name", lambda: self._own.name)

    @property
    def template(self) -> str:
        """The run directory on the disk of each node."""
        return str(self._folder / "{node}" / "run")

    def run_on(self, name: str) -> Path:
        """Return the run directory on the disk of one node."""
        return self._folder / name / "run"

    def seat(
        self, names: Sequence[str], call: Callable[[Any], Any]
    ) -> Callable[[Any], Any]:
        """Return a call for `run_ranks` whose ranks sit on these nodes, in order."""

        def call_there(comm: Any) -> Any:
            self._own.name = names[comm.rank]
            return call(comm)

        return call_there
