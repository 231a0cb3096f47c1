"""Lets atheris look for input that breaks a parser (programs/hostile_atheris.py)."""

import importlib.util
import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from mpickpt import read_manifest, step_path
from tests.faults.hostile_named import CONTROL
from tests.faults.hostile_readers import NEW, OLD
from tests.faults.matrix import Verdict
from tests.mpi_launch import REPOSITORY

FUZZER = str(REPOSITORY / "tests/faults/programs/hostile_atheris.py")
TARGETS = ("manifest", "index", "layout", "lease")
FUZZING_S = 30
FUZZING_IN_CI_S = 5
AT_A_TIME = 2
FUZZER_MIB = 1024


def fuzz(
    names: Sequence[str], base: Path, folder: Path
) -> Iterator[tuple[str, Verdict]]:
    """Run fuzzers, two at a time; say so where atheris is not installed."""
    if names and importlib.util.find_spec("atheris") is None:
        print("hostile: atheris left out, for it is not installed", flush=True)
        yield from ((name, Verdict()) for name in names)
        return
    corpus = _write_corpus(base / "run", folder / "corpus") if names else folder
    for start in range(0, len(names), AT_A_TIME):
        pair = names[start : start + AT_A_TIME]
        programs = [_start_fuzzing(name, corpus, folder) for name in pair]
        for name, (own, program) in zip(pair, programs, strict=True):
            yield name, _fuzzed(name, own, program)


def _write_corpus(run: Path, corpus: Path) -> Path:
    """Write what is valid, for the fuzzer to begin with, and words of the format."""
    for target in TARGETS:
        (corpus / target).mkdir(parents=True)
    words = set()
    for step in (OLD, NEW):
        path = step_path(run, step)
        manifest = read_manifest(path)
        (corpus / "manifest" / f"{step}").write_bytes(
            (path / "manifest.json").read_bytes()
        )
        assert manifest.layout is not None
        spans = [
            ("index", f"{s.rank}-{step}", s.path, s.index) for s in manifest.shards
        ]
        spans += [("layout", f"{step}", manifest.layout.path, manifest.layout.payload)]
        for target, name, file, (offset, nbytes, _) in spans:
            content = (path / file).read_bytes()[offset : offset + nbytes].rstrip()
            (corpus / target / name).write_bytes(content)
            words |= set(re.findall(rb'"[^"\\]{1,20}"', content))
    lease = json.dumps(CONTROL["lease/0000000001.json"])
    (corpus / "lease" / "1").write_text(lease)
    forms = "array tuple dict record live int float complex bytes str numpy"
    words |= {b'"$%s"' % form.encode() for form in forms.split()}
    words |= {b"9223372036854775807", b"9223372036854775808", b"1e400", b"NaN", b"null"}
    lines = [
        f'"{escaped(word)}"'
        for word in sorted(words)
        if word.isascii() and word.decode().isprintable()
    ]
    (corpus / "words").write_text("\n".join(lines) + "\n")
    return corpus


def escaped(word: bytes) -> str:
    """Return a word as it stands between quotes in a dictionary of libFuzzer."""
    return word.decode().replace("\\", "\\\\").replace('"', '\\"')


def _start_fuzzing(
    name: str, corpus: Path, folder: Path
) -> tuple[Path, "subprocess.Popen[bytes]"]:
    kind, _, target = name.partition("/")
    seconds = FUZZING_S if kind == "atheris" else FUZZING_IN_CI_S
    own = folder / name.replace("/", "-").replace(" ", "-")
    (own / "found").mkdir(parents=True)
    arguments = [
        *(FUZZER, target, f"-max_total_time={seconds}", "-timeout=10"),
        *(f"-rss_limit_mb={_memory_limit_mib()}", "-max_len=16384"),
        *("-seed=1", "-len_control=0"),
        *(f"-artifact_prefix={own}/", f"-dict={corpus / 'words'}"),
        *(str(own / "found"), str(corpus / target)),
    ]
    paths = [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    with (own / "log").open("wb") as log:
        program = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=own,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        )
    return own, program


def _memory_limit_mib() -> int:
    """Return the limit on a fuzzer's memory, in libFuzzer's way of counting.

    It asks for the peak since the process was started, which is that of the parent at
    first: Linux hands ru_maxrss on to a process that vfork made, through execve.
    """
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return FUZZER_MIB + (peak_kib >> 10)


def _fuzzed(name: str, own: Path, program: "subprocess.Popen[bytes]") -> Verdict:
    try:
        program.wait(FUZZING_S + 120)
    except subprocess.TimeoutExpired:
        program.kill()
        program.wait()
        return Verdict(hung=f"the fuzzer; see {own / 'log'}")
    log = (own / "log").read_text(errors="replace")
    done = re.search(r"Done (\d+) runs in (\d+) second", log)
    print(f"hostile/{name}: {done[0] if done else 'ended early'}", flush=True)
    if program.returncode == 0 and done:
        return Verdict()
    inputs = [file.read_bytes()[:400] for file in own.glob("*-*") if file.is_file()]
    told = f"input {inputs[:1]!r}: {log[-1500:]}"
    is_slow = any(word in log for word in ("timeout after", "out-of-memory"))
    return Verdict(hung=told) if is_slow else Verdict(wrong_error=told)
