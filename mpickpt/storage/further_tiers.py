"""Looks at the tiers behind the nodes' own disks; one process, no MPI."""

import logging
from collections import defaultdict
from collections.abc import Sequence

from mpickpt.errors import CheckpointError, CheckpointNotFoundError, StorageError
from mpickpt.format.manifest import parse_manifest
from mpickpt.format.naming import MANIFEST_NAME, step_directory_name
from mpickpt.format.records import ShardManifest
from mpickpt.storage.catalog import checkpoints, missing_shards, read_manifest_text
from mpickpt.storage.places import Place

log = logging.getLogger(__name__)


class FurtherTiers:
    """The runs in the tiers behind the first one, the nearest first.

    Parameters
    ----------
    runs : sequence of Path or RemotePath
        The run directory of each.

    Attributes
    ----------
    refusals : dict of int to str
        Tiers that did not answer, each with the reason.
    """

    def __init__(self, runs: Sequence[Place]) -> None:
        self.refusals: dict[int, str] = {}
        self._runs = runs

    def __bool__(self) -> bool:
        """Whether there is any."""
        return bool(self._runs)

    def directories(self, step: int) -> list[Place]:
        """Return where each tier has a step, or would have it."""
        return [run / step_directory_name(step) for run in self._runs]

    def published(self) -> dict[int, list[Place]]:
        """Return where they have which steps; one that refuses has none."""
        found: defaultdict[int, list[Place]] = defaultdict(list)
        for tier, run in enumerate(self._runs):
            try:
                for entry in checkpoints(run):
                    found[entry.step].append(entry.path)
            except StorageError as error:
                self._note_refusal(tier, error)
        return found

    def manifests(self, step: int) -> dict[int, bytes]:
        """Return the manifests of a step by tier, those that can be read."""
        found = {}
        for tier, directory in enumerate(self.directories(step)):
            if tier in self.refusals:
                continue
            try:
                content = read_manifest_text(directory)
                where = str(directory / MANIFEST_NAME)
                if parse_manifest(content, where=where).step == step:
                    found[tier] = content
            except CheckpointNotFoundError:
                pass
            except StorageError as error:
                self._note_refusal(tier, error)
            except CheckpointError as error:
                log.warning("%s is passed over: %s", directory, error)
        return found

    def missing_in(
        self, manifest: ShardManifest, published: Sequence[int]
    ) -> list[list[str] | None]:
        """Return which files of a checkpoint each tier has not; None: all.

        Parameters
        ----------
        manifest : ShardManifest
            Of the checkpoint.
        published : sequence of int
            The tiers that have its manifest. Another one may still have some files,
            of a copy that was not finished: files are as good without a manifest.
        """
        missing: list[list[str] | None] = []
        for tier, directory in enumerate(self.directories(manifest.step)):
            if tier in self.refusals:
                missing.append(None)
                continue
            try:
                gaps = missing_shards(directory, manifest)
            except CheckpointError as error:
                self._note_refusal(tier, error)
                missing.append([] if tier in published else None)
                continue
            if manifest.layout is not None and manifest.shards[0].path in gaps:
                gaps = [*gaps, manifest.layout.path]
            missing.append(gaps if len(gaps) <= manifest.world_size else None)
        return missing

    def _note_refusal(self, tier: int, error: CheckpointError) -> None:
        if tier not in self.refusals:
            log.warning("%s cannot be asked: %s", self._runs[tier], error)
        self.refusals[tier] = f"{self._runs[tier]} cannot be asked: {error.message}"
