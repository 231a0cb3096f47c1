"""A job array: one run directory per task, and each task is requeued by itself."""

from mpickpt import checkpoints


def test_array_task_is_requeued_alone(submit, uninterrupted):
    signalled = submit("array", "--array=0-1")
    other = submit.last
    signalled.wait_for(r"^step +15 ")

    signalled.signal("USR1")

    for task in (signalled, other):
        assert task.wait_until_ended() == "COMPLETED", task.account()
        assert task.digest() == uninterrupted, task.account()
        assert checkpoints(task.run_dir)[-1].step == 60
    assert signalled.shown("Restarts") == "1"
    assert signalled.resumed_from() == signalled.stopped_after() != []
    assert other.shown("Restarts") == "0"
    assert other.resumed_from() == other.stopped_after() == []
