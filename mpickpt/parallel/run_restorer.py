"""Restores steps of one run into the arrays of the program."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mpickpt.parallel.communicators import Conversations
from mpickpt.parallel.load import next_tag
from mpickpt.parallel.load_call import LoadCall, load_call
from mpickpt.parallel.restore import (
    MakeCall,
    Restored,
    nothing_found,
    restore_newest,
    restore_one,
)
from mpickpt.parallel.run_keeper import RunKeeper
from mpickpt.parallel.waiting import run
from mpickpt.storage.catalog import step_path


class RunRestorer:
    """Restores steps of one run.

    Parameters
    ----------
    talks : Conversations
        The ranks.
    keeper : RunKeeper
        Of the run directory.
    state, max_attempts
        As in `CheckpointManager`.
    """

    def __init__(
        self,
        talks: Conversations,
        keeper: RunKeeper,
        *,
        state: Callable[[], Any],
        max_attempts: int,
    ) -> None:
        self._talks = talks
        self._keeper = keeper
        self._state = state
        self._max_attempts = max_attempts

    def newest(self, required: bool | None, **options: Any) -> Restored | None:
        """Load the newest checkpoint that is whole; as `restore_latest`."""
        talk = self._talks.load
        restored = run(
            restore_newest(
                talk,
                self._keeper,
                self._make_call(options),
                tag=next_tag(self._talks.memory),
                max_attempts=self._max_attempts,
            )
        )
        if restored is None:
            run_dir = self._keeper.run.path
            run(talk.on_root(lambda: nothing_found(run_dir, required), "restore"))
        return restored

    def one(self, step: int, **options: Any) -> Restored:
        """Load the checkpoint of a step."""
        path = step_path(self._keeper.run.path, step)
        tag = next_tag(self._talks.memory)
        make_call = self._make_call(options)
        talk = self._talks.load
        run(talk.on_root(self._look, "restore"))
        return run(restore_one(talk, self._keeper, make_call, path, tag=tag))

    def _look(self) -> bytes:
        self._keeper.look_for_writer()
        self._keeper.look()
        return b""

    def _make_call(self, options: dict[str, Any]) -> MakeCall:
        def make_call(path: Path) -> LoadCall:
            return load_call(path, like=lambda _manifest: self._state(), **options)

        return make_call
