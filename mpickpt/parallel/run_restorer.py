"""Restores steps of one run into the arrays of the program."""

from collections.abc import Callable, Sequence
from typing import Any

from mpickpt.format.naming import MANIFEST_NAME
from mpickpt.parallel.communicators import Conversations
from mpickpt.parallel.line import ROOT
from mpickpt.parallel.load import next_tag
from mpickpt.parallel.load_call import LoadCall, load_call
from mpickpt.parallel.restore import (
    MakeCall,
    Restored,
    nothing_found,
    require_all_asked,
    restore_newest,
    restore_one,
)
from mpickpt.parallel.run_keeper import RunKeeper
from mpickpt.parallel.waiting import Steps, run
from mpickpt.storage.catalog import step_path
from mpickpt.storage.further_tiers import FurtherTiers
from mpickpt.storage.places import Place, is_there
from mpickpt.storage.remote_path import parse_place


class RunRestorer:
    """Restores steps of one run.

    Parameters
    ----------
    talks : Conversations
        The ranks.
    keeper : RunKeeper
        Of the run directory.
    others : sequence of Path or RemotePath
        The run in further tiers, the nearest first.
    state, max_attempts
        As in `CheckpointManager`.
    """

    def __init__(
        self,
        talks: Conversations,
        keeper: RunKeeper,
        *,
        others: Sequence[Place] = (),
        state: Callable[[], Any],
        max_attempts: int,
    ) -> None:
        self._talks = talks
        self._keeper = keeper
        self._others = others
        self._state = state
        self._max_attempts = max_attempts

    def newest(self, required: bool | None, **options: Any) -> Restored | None:
        """Load the newest checkpoint that is whole; as `restore_latest`."""
        talk = self._talks.load
        others = FurtherTiers(self._others)
        restored = run(
            restore_newest(
                talk,
                self._keeper,
                self._make_call(options),
                others=others,
                tag=next_tag(self._talks.memory),
                max_attempts=self._max_attempts,
            )
        )
        if restored is None:
            run(talk.on_root(lambda: self._nothing_found(others, required), "restore"))
        return restored

    def one(self, step: int, **options: Any) -> Restored:
        """Load the checkpoint of a step."""
        tag = next_tag(self._talks.memory)
        make_call = self._make_call(options)
        talk = self._talks.load
        place = run(talk.on_root(lambda: self._nearest(step), "restore")).decode(
            "utf-8", "surrogateescape"
        )
        path = parse_place(place)
        own = step_path(self._keeper.run.path, step)
        if path.name != own.name:
            path = own  # ranks that want different steps are told so
        return run(restore_one(talk, self._keeper, make_call, path, tag=tag))

    def leads(self) -> Steps[bool]:
        """Tell whether this rank looks after the run directory; collective."""
        yield from ()
        return self._talks.load.rank == ROOT

    def on_each_node(self, call: Callable[[], object], phase: str) -> Steps[None]:
        """Call on rank 0, which keeps the one directory of all nodes; collective."""
        talk = self._talks.load
        yield from talk.agree(lambda: call() if talk.rank == ROOT else None, phase)

    def _nothing_found(self, others: FurtherTiers, required: bool | None) -> bytes:
        if required is not False:
            require_all_asked("; ".join(others.refusals.values()))
        return nothing_found(self._keeper.run.path, required)

    def _nearest(self, step: int) -> bytes:
        """Return where the nearest checkpoint of a step is, or would be."""
        self._keeper.look_for_writer()
        self._keeper.look()
        own = step_path(self._keeper.run.path, step)
        further = FurtherTiers(self._others)
        places = [own, *further.directories(step)]
        found = (place for place in places if is_there(place / MANIFEST_NAME))
        return str(next(found, own)).encode("utf-8", "surrogateescape")

    def _make_call(self, options: dict[str, Any]) -> MakeCall:
        def make_call(path: Place) -> LoadCall:
            return load_call(path, like=lambda _manifest: self._state(), **options)

        return make_call
