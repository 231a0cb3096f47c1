"""What rank 0 does to the directory of a checkpoint."""

import numpy as np
import pytest

from mpickpt import IncompleteCheckpointError, Replicated, read_manifest, save_sharded
from mpickpt.storage.checkpoint_writer import publish_checkpoint


def test_publish_is_refused_when_another_save_has_swept_a_shard(tmp_path):
    save_sharded({"x": Replicated(np.ones(3))}, tmp_path / "c", step=1)
    manifest = read_manifest(tmp_path / "c")
    (tmp_path / "c/manifest.json").unlink()
    shard = tmp_path / "c" / manifest.shards[0].path
    shard.unlink()

    with pytest.raises(IncompleteCheckpointError, match=shard.name):
        publish_checkpoint(tmp_path / "c", manifest)

    assert not (tmp_path / "c/manifest.json").exists()
