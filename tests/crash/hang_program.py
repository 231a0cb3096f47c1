"""A program of several ranks, one of which misbehaves; each reports what it raised.

``hang_program.py BEHAVIOUR CULPRIT DIRECTORY``
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from mpi4py import MPI

from mpickpt.parallel.collective import conversations_of, run

LONG_S = 300


def main(behaviour, culprit, directory):
    comm = MPI.COMM_WORLD
    is_culprit = comm.rank == culprit
    if is_culprit:
        (directory / "culprit.pid").write_text(str(os.getpid()))
    if behaviour == "never_calls":
        if is_culprit:
            time.sleep(LONG_S)
        return report(directory, comm, lambda: conversations_of(comm).save)
    # A launcher may have started this process with SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    talk = conversations_of(comm).save
    run(talk.allgather(b"all are here", "first"))
    if is_culprit:
        return misbehave(behaviour, talk, directory, comm)
    if behaviour == "interrupts_itself" and comm.rank == comm.size - 1:
        # Nobody's call can end while this rank stays away.
        time.sleep(LONG_S)
    if behaviour == "exits_early":
        return run(talk.allgather(b"record", "second"))
    return report(directory, comm, lambda: run(wait(behaviour, talk)))


def wait(behaviour, talk):
    if behaviour == "leaves_exchange":
        return talk.exchange({0: b"message"}, "second")
    if behaviour == "stops_in_work":
        return talk.work(lambda _: None, "second")
    return talk.allgather(b"record", "second")


def misbehave(behaviour, talk, directory, comm):
    if behaviour == "stops_itself":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif behaviour == "stops_in_work":
        run(talk.work(lambda _: os.kill(os.getpid(), signal.SIGSTOP), "second"))
    elif behaviour == "interrupts_itself":
        interrupt = threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGINT])
        interrupt.start()
        report(directory, comm, lambda: run(talk.allgather(b"record", "second")))
    elif behaviour == "comes_late":
        time.sleep(8)
        report(directory, comm, lambda: run(talk.allgather(b"record", "second")))
    time.sleep(LONG_S)


def report(directory, comm, call):
    """Write what the call raised, and what a later call raises."""
    error, waited_s = outcome(call)
    later, later_waited_s = outcome(
        lambda: run(conversations_of(comm).load.allgather(b"later", "later"))
    )
    path = directory / f"rank{comm.rank}.json"
    content = {
        "error": type(error).__name__,
        "text": str(error),
        "missing_ranks": getattr(error, "missing_ranks", None),
        "waited_s": waited_s,
        "later_error": type(later).__name__,
        "later_waited_s": later_waited_s,
    }
    path.with_suffix(".tmp").write_text(json.dumps(content))
    path.with_suffix(".tmp").replace(path)
    time.sleep(LONG_S)


def outcome(call):
    begin, error = time.monotonic(), None
    try:
        call()
    except BaseException as raised:
        error = raised
    return error, time.monotonic() - begin


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
