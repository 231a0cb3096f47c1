"""Measures mpickpt and DCP on one FSDP2 state; start it with torch_peers.sh.

`mpickpt.torch` is a save of adapted objects, `DcpWriter` the same storage below DCP's
own save, and DCP its FileSystemWriter with sync_files. All write the same tensors
and end when their files are synced; they take turns, in another order in each round,
and values are medians of the ratios within a round.
"""

import argparse
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed.checkpoint as checkpointing
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import mpickpt.torch
from mpickpt.bench.bench import Bench, Reading
from mpickpt.bench.command import declare_arguments, measure_and_print
from mpickpt.bench.load import how_cold
from mpickpt.bench.rounds import Timings, Way, shuffled
from mpickpt.bench.rows import Row, Target, at_least, at_most
from mpickpt.cli.status import UsageError
from tests.benchmarks.peers.dcp import join
from tests.benchmarks.peers.groups import time_blocking

ADAPTED, WRITER, READER = "mpickpt.torch", "DcpWriter", "DcpReader"
PEER = "DCP"
THREADS = (1, 2)
WIDTH = 1024
PARAMETERS = 10_000
SMALL = (32, 32)
BYTES_A_PARAMETER = 12  # float32: itself and two moments


class Program:
    """An FSDP2 model and its optimizer on all ranks, and the ways to save them."""

    def __init__(self, bench: Bench, module: torch.nn.Module, *, moments: bool) -> None:
        self.bench = bench
        mesh = init_device_mesh("cpu", (bench.ranks.size,))
        self.model = fully_shard(module, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        for parameter in self.model.parameters() if moments else ():
            parameter.grad = parameter.detach().clone()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.places = {name: bench.directory / name for name in (ADAPTED, WRITER, PEER)}
        # Kept from save to save, so that what it staged is memory to be used again.
        self.stager = DefaultStager(StagingOptions(False, False, False, False))

    def adapted(self) -> Any:
        objects = {"model": self.model, "optim": self.optimizer}
        return mpickpt.torch.adapt(objects)

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optim": self.optimizer.state_dict()}

    def writer(self) -> Any:
        return mpickpt.torch.DcpWriter(self.places[WRITER], self.bench.ranks.comm)

    def peer(self, thread_count: int = 1) -> Any:
        return FileSystemWriter(
            self.places[PEER], sync_files=True, thread_count=thread_count
        )

    def save(self) -> None:
        comm = self.bench.ranks.comm
        mpickpt.save_sharded(self.adapted(), self.places[ADAPTED], step=0, comm=comm)

    def save_by(self, writer: Callable[[], Any]) -> None:
        with _without_warnings():
            checkpointing.save(self.state(), storage_writer=writer())

    def saves(self) -> dict[str, Way]:
        ways: dict[str, Way] = {
            ADAPTED: self.save,
            WRITER: lambda: self.save_by(self.writer),
        }
        for count in THREADS:
            name = f"{PEER}, {count} thread{'s' * (count > 1)}"
            ways[name] = lambda count=count: self.save_by(lambda: self.peer(count))
        return ways

    def load(self) -> None:
        comm, path = self.bench.ranks.comm, self.places[ADAPTED]
        mpickpt.load_sharded(path, comm=comm, like=self.adapted())

    def load_by(self, reader: Any) -> None:
        with _without_warnings():
            checkpointing.load(self.state(), storage_reader=reader)

    def loads(self) -> dict[str, Way]:
        comm, places = self.bench.ranks.comm, self.places
        return {
            ADAPTED: self.load,
            READER: lambda: self.load_by(mpickpt.torch.DcpReader(places[WRITER], comm)),
            PEER: lambda: self.load_by(FileSystemReader(places[PEER])),
        }

    def begins(self) -> dict[str, Callable[[], Any]]:
        comm, path = self.bench.ranks.comm, self.places[ADAPTED]
        return {
            ADAPTED: lambda: mpickpt.save_sharded_async(
                self.adapted(), path, step=0, comm=comm
            ),
            WRITER: lambda: self.begin(self.writer(), self.stager),
            f"{PEER}": lambda: self.begin(self.peer(), None),
            f"{PEER}, stager kept": lambda: self.begin(self.peer(), self.stager),
        }

    def begin(self, writer: Any, stager: Any) -> Any:
        with _without_warnings():
            return checkpointing.async_save(
                self.state(), storage_writer=writer, async_stager=stager
            )


def compare_saves(bench: Bench) -> list[Row]:
    program = large(bench)
    timings = bench.take_turns(program.saves())
    return _rows(bench, "save", timings, at_least(1))


def compare_loads(bench: Bench) -> list[Row]:
    program = large(bench)
    for way in (ADAPTED, WRITER, f"{PEER}, 1 thread"):
        program.saves()[way]()
    loads = program.loads()
    ours = loads[ADAPTED] = Reading(loads[ADAPTED])
    before = [parameter.full_tensor().clone() for parameter in _some(program)]
    with torch.no_grad():
        for parameter in program.model.parameters():
            parameter.zero_()

    timings = Timings({name: [] for name in loads})
    for number in range(bench.repeat + 1):
        for name in shuffled([*loads], number):
            bench.forget_pages(*program.places.values())
            seconds = bench.ranks.timed(loads[name])
            if number:
                timings.seconds[name].append(seconds)

    after = [parameter.full_tensor() for parameter in _some(program)]
    assert all(map(torch.equal, before, after)), "a load gave other values"
    return _rows(bench, "load", timings, at_least(1), how_cold(bench, ours))


def compare_blocking(bench: Bench) -> list[Row]:
    begins = large(bench).begins()
    timings = time_blocking(bench, begins)
    peer = timings.fastest(PEER)
    millis = ", ".join(map(timings.millis_text, begins))
    return [
        Row(
            group="async",
            subject=f"asynchronous save of {ours} blocks, times {peer}",
            value=timings.ratio(ours, peer),
            target=at_most(1),
            how=millis,
            seconds=timings.seconds if ours == ADAPTED else {},
        )
        for ours in (ADAPTED, WRITER)
    ]


def compare_many_parameters(bench: Bench) -> list[Row]:
    join(bench.ranks)
    torch.manual_seed(1)
    small = torch.nn.ParameterList(torch.rand(SMALL) for _ in range(PARAMETERS))
    timings = bench.take_turns(Program(bench, small, moments=False).saves())
    name = f"save of {PARAMETERS:,} parameters of {SMALL[0] * SMALL[1] * 4 >> 10} KiB"
    return _rows(bench, name, timings, at_least(1))


def large(bench: Bench) -> Program:
    """Return a program with as many bytes on each rank as were asked for."""
    join(bench.ranks)
    torch.manual_seed(1)
    count = bench.total_nbytes // (BYTES_A_PARAMETER * WIDTH * WIDTH)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(max(1, count))]
    return Program(bench, torch.nn.Sequential(*layers), moments=True)


GROUPS = {
    "save": compare_saves,
    "load": compare_loads,
    "async": compare_blocking,
    "many-parameters": compare_many_parameters,
}


def _some(program: Program) -> list[Any]:
    return [*program.model.parameters()][:2]


def _rows(
    bench: Bench, name: str, timings: Timings, target: Target, how: str = ""
) -> list[Row]:
    peer = timings.fastest(PEER)
    millis = ", ".join(map(timings.millis_text, timings.seconds))
    return [
        Row(
            group=name.split()[0],
            subject=f"{name}, {ours}, against {peer}",
            value=timings.ratio(peer, ours),
            target=target,
            how="; ".join(filter(None, [millis, how])),
            seconds=timings.seconds if ours == ADAPTED else {},
        )
        for ours in timings.seconds
        if not ours.startswith(PEER)
    ]


def _without_warnings() -> Any:
    return warnings.catch_warnings(action="ignore")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="torch_peers.sh", description=(__doc__ or "").splitlines()[0]
    )
    declare_arguments(parser, list(GROUPS))
    options = parser.parse_args(arguments)
    try:
        return measure_and_print(options, GROUPS)
    except UsageError as error:
        sys.stderr.write(f"torch_peers.sh: {error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
