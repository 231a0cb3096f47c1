import json
import subprocess
import sys

import pytest

from mpickpt.cli.main import main

JOB = ["plan", "--nbytes", "1TB", "--ranks", "64"]


def document(capsys, *arguments):
    assert main([*JOB, *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_plan_says_four_hours_against_four_minutes(capsys):
    assert main(JOB) == 0

    out = capsys.readouterr().out
    assert (
        "gathering takes 64.0 times as long as shards: 3.97 h against 3.72 min" in out
    )
    assert "assumed" in out
    assert "1 TB / min(64 x 70 MB/s, no limit) = 1 TB / 4.48 GB/s = 3.72 min" in out


def test_parameters_give_the_bytes(capsys):
    assert main(["plan", "--params", "70e9", "--ranks", "64", "--json"]) == 0

    assert json.loads(capsys.readouterr().out)["nbytes"] == 980 * 10**9


def test_speeds_that_are_given_are_taken(capsys):
    told = document(
        capsys,
        *("--gather-bandwidth", "10Gbit/s", "--rank-bandwidth", "500MB/s"),
        *("--fs-bandwidth", "20GB/s", "--memory-bandwidth", "5GB/s"),
    )

    assert told["bytes_per_second"] == {
        "link": 1.25e9,
        "rank": 5e8,
        "fs": 2e10,
        "memory": 5e9,
    }
    assert set(told["sources"].values()) == {"given"}
    shards = next(way for way in told["ways"] if way["name"] == "shards")
    assert shards["save_s"] == 50


def test_speed_is_measured_where_asked(capsys, tmp_path):
    told = document(capsys, "--measure", str(tmp_path))

    assert told["bytes_per_second"]["rank"] > 0
    assert told["sources"]["rank"].startswith("measured in")
    assert not list(tmp_path.iterdir())


def test_steps_follow_from_the_time_of_one(capsys):
    assert main([*JOB, "--step-time", "20s"]) == 0

    assert "EverySteps(13)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ranks", "4"], "either --params or --nbytes"),
        (["--ranks", "4", "--params", "1", "--nbytes", "1"], "either --params or"),
        (["--ranks", "4", "--nbytes", "1", "--bytes-per-param", "2"], "goes with"),
        (["--ranks", "4", "--nbytes", "1", "--measure", "/nowhere"], "no such dir"),
        (
            ["--ranks", "4", "--nbytes", "1", "--measure", "/", "--rank-band", "1"],
            "not both",
        ),
        (["--ranks", "0", "--nbytes", "1"], "--ranks: '0': expected"),
        (["--ranks", "x", "--nbytes", "1"], "--ranks: 'x': expected"),
        (["--ranks", "4", "--nbytes", "1XB"], "'1XB' is no size"),
        (["--ranks", "4", "--nbytes", "1", "--mtbf", "soon"], "'soon' is no time"),
        (["--ranks", "4", "--nbytes", "1", "--link", "fast"], "'fast' is no speed"),
        (["--ranks", "4", "--params", "many"], "no number above 0"),
        (["--nbytes", "1"], "--ranks"),
    ],
)
def test_bad_input_is_named(arguments, said, capsys):
    try:
        status = main(["plan", *arguments])
    except SystemExit as end:
        status = end.code

    assert status == 2
    assert said in capsys.readouterr().err


def test_plan_imports_neither_mpi_nor_arrays_nor_hdf5():
    code = (
        "import sys; from mpickpt.cli.main import main; main(sys.argv[1:]); "
        "sys.exit(any(name in sys.modules for name in ('mpi4py', 'h5py', 'rich')))"
    )

    ended = subprocess.run([sys.executable, "-c", code, *JOB], capture_output=True)

    assert ended.returncode == 0
