"""The command around the importers: arguments, words, exit status, one rank or many."""

from contextlib import contextmanager

import numpy as np
import pytest

import mpickpt
from mpickpt import Sharded, StreamedArray, importers
from mpickpt.interop import import_command
from mpickpt.interop.progress import watched
from tests.mpi_launch import finish, start
from tests.unit.cli_runs import run

PROGRAM = "tests/interop/programs/run_fake_import.py"
FAKE = "tests.interop.fake_importer"


@pytest.fixture(autouse=True)
def fake_importers(monkeypatch):
    for kind, (_, meaning) in import_command.KINDS.items():
        monkeypatch.setitem(import_command.KINDS, kind, (FAKE, meaning))


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "source"
    path.write_text("good 3")
    return path


def test_import_says_what_came_of_it(tmp_path, capsys, source):
    status, out, err = run(capsys, "import", "dcp", source, tmp_path / "c")

    assert (status, err) == (0, "")
    assert out.startswith(f"{tmp_path / 'c'}: step 4, ")
    with mpickpt.open_checkpoint(tmp_path / "c") as checkpoint:
        np.testing.assert_array_equal(checkpoint["x"], np.arange(3.0))


@pytest.mark.parametrize(
    ("words", "step", "skip"),
    [
        (["dcp", "--step", 9, "--skip", "a*", "--skip", "b"], 9, ["a*", "b"]),
        (["deepspeed", "--tag", "global_step2"], 4, ["global_step2"]),
        (["nemo", "--iteration", 100], 100, []),
    ],
)
def test_import_passes_on_what_was_chosen(tmp_path, capsys, source, words, step, skip):
    status, _, _ = run(capsys, "import", *words, source, tmp_path / "c")

    with mpickpt.open_checkpoint(tmp_path / "c") as checkpoint:
        assert (status, checkpoint.manifest.step) == (0, step)
        assert checkpoint["skip"] == skip


def test_import_takes_the_step_in_the_name_of_the_target(tmp_path, capsys, source):
    target = tmp_path / "run" / "step-0000000100"

    wrong, _, err = run(capsys, "import", "dcp", "--step", 7, source, target)
    right, _, _ = run(capsys, "import", "dcp", source, target)

    assert (wrong, "no name for step 7" in err, right) == (2, True, 0)
    assert mpickpt.read_manifest(target).step == 100
    assert mpickpt.latest(tmp_path / "run") == target


def test_import_replaces_a_checkpoint_only_when_told(tmp_path, capsys, source):
    words = ["import", "dcp", source, tmp_path / "c"]
    run(capsys, *words)

    again, _, err = run(capsys, *words)
    told, _, _ = run(capsys, *words, "--overwrite")

    assert (again, "already" in err, told) == (1, True, 0)


def test_import_of_what_is_refused_is_damage(tmp_path, capsys, source):
    source.write_text("broken")

    status, _, err = run(capsys, "import", "dcp", source, tmp_path / "c")

    assert (status, err) == (3, f"mpickpt: {source} asks for os.system\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["dcp", "s3://bucket/x", "c"], "copy it first"),
        (["dcp", "x", "s3://bucket/c"], "copy it first"),
        (["orbax", "x", "c"], "invalid choice: 'orbax'"),
        (["dcp", "x", "c", "--step", "x"], "argument --step"),
        (["deepspeed", "x", "c", "--skip", "*"], "unrecognized arguments"),
        (["dcp", "x", "c", "--tag", "t"], "unrecognized arguments"),
    ],
)
def test_import_refuses_other_arguments(capsys, words, said):
    with pytest.raises(SystemExit) as ended:
        run(capsys, "import", *words)

    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def under_mpiexec(size, *words):
    program = start([PROGRAM, *map(str, words)], size=size)
    outcome = finish(program, timeout_s=60)
    assert not outcome.timed_out
    return outcome.returncode, outcome.output.splitlines()


def test_import_under_mpiexec_speaks_once(tmp_path, source):
    status, lines = under_mpiexec(3, "dcp", source, tmp_path / "c")

    assert (status, len(lines)) == (0, 1), lines
    assert mpickpt.read_manifest(tmp_path / "c").world_size == 3


def test_import_under_mpiexec_fails_with_one_word_on_all_ranks(tmp_path, source):
    source.write_text("broken")

    status, lines = under_mpiexec(3, "dcp", source, tmp_path / "c")

    assert (status, lines) == (3, [f"mpickpt: {source} asks for os.system"])


def test_import_under_mpiexec_ends_all_ranks_by_a_fault_of_one(tmp_path, source):
    source.write_text("bug 3")

    status, lines = under_mpiexec(3, "dcp", source, tmp_path / "c")

    assert status != 0
    assert any("a fault of ours" in line for line in lines)
    assert not (tmp_path / "c" / "manifest.json").exists()


def test_import_under_mpiexec_reads_a_real_source(tmp_path):
    pytest.importorskip("torch")
    from tests.interop.foreign_samples import make_dcp

    source, target = tmp_path / "source", tmp_path / "c"
    make_dcp(source)
    program = start(
        ["-m", "mpickpt", "import", "dcp", str(source), str(target)], size=2
    )
    outcome = finish(program, timeout_s=60)

    assert outcome.returncode == 0, outcome.output
    assert outcome.output.startswith(f"{target}: step 2, ")
    manifest = mpickpt.read_manifest(target)
    assert manifest.world_size == 2
    assert manifest.metadata["imported"]["source"] == str(source)


def test_import_shows_how_far_it_has_come(tmp_path, capsys, source, monkeypatch):
    shown = []

    @contextmanager
    def note(title, total):
        shown.append((title, total))
        yield shown.append

    monkeypatch.setattr(import_command, "copy_progress", note)
    source.write_text("good 500000")

    run(capsys, "import", "dcp", source, tmp_path / "c")

    assert shown[0] == ("import", 4_000_000)
    assert sum(shown[1:]) == 4_000_000
    assert len(shown) > 2


def test_watched_state_is_the_same_and_tells_what_was_read(tmp_path):
    elements = np.arange(300_000.0)

    class Elements(StreamedArray):
        shape, dtype = elements.shape, elements.dtype

        def read(self, box):
            return elements[box]

    def state():
        pieces = Sharded.pieces([((0,), Elements())], global_shape=elements.shape)
        return {"a": [pieces, 1], "b": (Sharded.block(np.ones(3)), {"c": "text"})}

    told = []
    watching = watched(state(), lambda nbytes, total: told.append((nbytes, total)))
    mpickpt.save_sharded(watching, tmp_path / "watched", step=1)
    mpickpt.save_sharded(state(), tmp_path / "alone", step=1)

    digests = [
        [shard.sha256 for shard in mpickpt.read_manifest(tmp_path / name).shards]
        for name in ("watched", "alone")
    ]
    assert digests[0] == digests[1]
    assert {total for _, total in told} == {elements.nbytes}
    assert sum(nbytes for nbytes, _ in told) == elements.nbytes


def test_every_kind_is_an_importer_of_that_name(monkeypatch):
    monkeypatch.undo()

    assert sorted(import_command.KINDS) == sorted(importers.__all__)
    for kind in import_command.KINDS:
        assert getattr(importers, kind).__name__ == kind
        assert kind in dir(importers)
    with pytest.raises(AttributeError, match="no attribute 'orbax'"):
        importers.orbax  # noqa: B018
