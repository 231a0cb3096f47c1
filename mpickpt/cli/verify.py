"""`mpickpt verify CKPT|RUN`: read every byte and compare it with the digests."""

import argparse
from collections.abc import Iterator
from typing import Any

from mpickpt.cli.output import nbytes_text, print_json, print_line, progress_bar
from mpickpt.cli.place_arguments import checkpoint_place, count
from mpickpt.cli.status import DAMAGED, UNREADABLE, WHOLE, status_of
from mpickpt.errors import CheckpointError, CheckpointNotFoundError
from mpickpt.format.naming import MANIFEST_NAME
from mpickpt.storage.catalog import checkpoints, read_manifest
from mpickpt.storage.places import Place, is_there
from mpickpt.storage.verification import DamagedBlock, VerifyReport, verify_checkpoint


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument(
        "path",
        metavar="CKPT|RUN",
        type=checkpoint_place,
        help="checkpoint or run, a directory or URL",
    )
    parser.add_argument(
        "--fast",
        action="store_true",
        help="CRC-32 of every block alone, without the SHA-256 of every file",
    )
    parser.add_argument(
        "--jobs", metavar="N", type=count, help="files read at the same time"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Print a verdict for each checkpoint, with all damage there is."""
    verdicts = []
    for path in _targets(options.path):
        verdict = _verdict(path, options)
        verdicts.append(verdict)
        if not options.json:
            _print_verdict(verdict)
    if options.json:
        print_json(verdicts)
    found = {verdict["status"] for verdict in verdicts}
    return next((code for code in (DAMAGED, UNREADABLE) if code in found), WHOLE)


def _targets(path: Place) -> Iterator[Place]:
    published = [] if is_there(path / MANIFEST_NAME) else checkpoints(path)
    if not published:
        read_manifest(path)  # says best what is wrong with the path, if anything is
        yield path
    for entry in published:
        yield entry.path


def _verdict(path: Place, options: argparse.Namespace) -> dict[str, Any]:
    try:
        total = read_manifest(path).nbytes
        with progress_bar(path.name, total) as progress:
            report = verify_checkpoint(
                path, fast=options.fast, jobs=options.jobs, progress=progress
            )
    except CheckpointNotFoundError:
        if path == options.path:
            raise
        return _refused(path, "deleted meanwhile", WHOLE)
    except CheckpointError as error:
        return _refused(path, str(error), status_of(error))
    return _described(report)


def _refused(path: Place, problem: str, status: int) -> dict[str, Any]:
    return {
        "path": str(path),
        "step": None,
        "status": status,
        "problem": problem,
        "files": [],
        "left_over": [],
    }


def _described(report: VerifyReport) -> dict[str, Any]:
    statuses = {status_of(f.error) for f in report.failures if f.error is not None}
    damage = DAMAGED if statuses - {UNREADABLE} else UNREADABLE
    return {
        "path": str(report.path),
        "step": report.manifest.step,
        "status": WHOLE if report.is_whole else damage,
        "problem": None,
        "nbytes": report.manifest.nbytes,
        "files": [
            {
                "path": file.path,
                "nbytes": file.nbytes,
                "problem": None if file.error is None else str(file.error),
                "damaged_blocks": [_block(block) for block in file.blocks],
            }
            for file in report.files
        ],
        "left_over": list(report.rubbish),
    }


def _block(block: DamagedBlock) -> dict[str, Any]:
    return {
        "number": block.number,
        "start": block.start,
        "stop": block.stop,
        "keys": list(block.keys),
    }


def _print_verdict(verdict: dict[str, Any]) -> None:
    path, files = verdict["path"], verdict["files"]
    if verdict["problem"] is not None:
        print_line(f"{path}: {verdict['problem']}")
        return
    words = {WHOLE: "whole", DAMAGED: "damaged", UNREADABLE: "unreadable"}
    size = nbytes_text(verdict["nbytes"])
    print_line(f"{path}: {words[verdict['status']]} ({len(files)} files, {size})")
    for file in files:
        if file["problem"] is not None:
            print_line(f"  {file['problem']}")
        for block in file["damaged_blocks"]:
            held = ", ".join(block["keys"]) or "no array"
            place = f"bytes {block['start']} to {block['stop']}"
            print_line(f"    block {block['number']}, {place}: {held}")
    for name in verdict["left_over"]:
        print_line(f"  left over from another save, harmless: {name}")
