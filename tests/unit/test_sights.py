"""What all nodes have together, from what each tells."""

from mpickpt.planning.sights import NodeSight, Sights, StepSight

ID, OTHER = "a" * 32, "b" * 32
SHARD, COPY = "rank00000-aaaaaaaa.h5", "rank00001-aaaaaaaa.h5"


def sight(step=1, **told):
    return NodeSight(steps=[StepSight(step=step, **told)])


def published(checkpoint_id=ID, created_at="2026-01-01T00:00:00Z", **told):
    return sight(checkpoint_id=checkpoint_id, created_at=created_at, **told)


def test_one_manifest_is_enough():
    sights = Sights([sight(files={SHARD: 5}), published()])

    (found,) = sights.checkpoints(1)

    assert sights.steps() == [1]
    assert (found.checkpoint_id, found.published, found.lacking) == (ID, (1,), (0,))


def test_shards_without_a_manifest_anywhere_are_no_checkpoint():
    sights = Sights([sight(files={SHARD: 5})])

    assert sights.steps() == []
    assert sights.checkpoints(1) == []


def test_damaged_manifest_counts_as_lacking_where_shards_are():
    sights = Sights(
        [
            published(),
            sight(problem="not JSON", files={COPY: 5}),
            sight(problem="not JSON", files={"rank00000-bbbbbbbb.h5": 5}),
        ]
    )

    assert sights.checkpoints(1)[0].lacking == (1,)
    assert sights.problems(1) == {1: "not JSON", 2: "not JSON"}


def test_checkpoint_that_was_saved_last_comes_first():
    sights = Sights([published(), published(OTHER, "2026-02-01T00:00:00Z")])

    assert [one.checkpoint_id for one in sights.checkpoints(1)] == [OTHER, ID]


def test_attempts_are_the_most_that_a_node_counted():
    sights = Sights([sight(attempts=1), sight(attempts=3), NodeSight(problem="EIO")])

    assert sights.attempts(1) == 3
    assert sights.attempts(2) == 0


def test_sight_travels():
    one = published(files={SHARD: 5})

    assert NodeSight.decode(one.encode()) == one
