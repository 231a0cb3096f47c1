"""Names that a foreign checkpoint gives never lead out of it."""

import os
from pathlib import Path

import pytest

from mpickpt import (
    CheckpointNotFoundError,
    IncompleteCheckpointError,
    ManifestError,
    StorageError,
)
from mpickpt.interop.sources.containment import (
    contained,
    names_inside,
    nbytes_contained,
    open_contained,
    read_contained,
)


@pytest.fixture
def root(tmp_path):
    (tmp_path / "root" / "inner").mkdir(parents=True)
    (tmp_path / "root" / "inner" / "file").write_bytes(b"inside")
    (tmp_path / "secret").write_bytes(b"outside")
    return tmp_path / "root"


def test_name_inside_is_a_path(root):
    assert contained(root, "inner/file") == root / "inner" / "file"
    assert contained(root, "not/there") == root / "not" / "there"
    assert read_contained(root, "inner/file", 6) == b"inside"
    assert nbytes_contained(root, "inner/file") == 6


@pytest.mark.parametrize(
    "name",
    [
        "",
        "/",
        "/etc/passwd",
        "..",
        "../secret",
        "inner/../../secret",
        "inner//file",
        "inner/./file",
        "inner/",
        "inner/file\0",
        "a" * 5000,
    ],
)
@pytest.mark.parametrize("ask", [contained, open_contained])
def test_name_that_is_no_plain_path_is_refused(ask, name, root):
    with pytest.raises(ManifestError, match="plain path"):
        ask(root, name)


@pytest.mark.parametrize("ask", [contained, open_contained])
def test_symlink_is_refused_wherever_it_leads(ask, root):
    (root / "link").symlink_to(root / "inner" / "file")
    (root / "folder").symlink_to(root.parent)

    for name in ("link", "folder/secret"):
        with pytest.raises(ManifestError, match="symlink"):
            ask(root, name)


def test_root_may_be_reached_by_a_symlink(root, tmp_path):
    (tmp_path / "link").symlink_to(root)

    assert read_contained(tmp_path / "link", "inner/file", 100) == b"inside"


def test_missing_file_is_incomplete(root):
    with pytest.raises(IncompleteCheckpointError, match="missing"):
        open_contained(root, "inner/none")


@pytest.mark.timeout(10)
def test_fifo_and_directory_are_no_files(root):
    os.mkfifo(root / "fifo")

    for name in ("fifo", "inner"):
        with pytest.raises(StorageError, match="regular"):
            open_contained(root, name)


def test_longer_file_than_expected_is_refused(root):
    with pytest.raises(ManifestError, match="more than 5 bytes"):
        read_contained(root, "inner/file", 5)


def test_no_descriptor_is_left_open(root):
    before = len(os.listdir("/proc/self/fd"))

    for name in ("inner", "inner/none", "none/none"):
        with pytest.raises((StorageError, IncompleteCheckpointError)):
            open_contained(root, name)

    assert len(os.listdir("/proc/self/fd")) == before


def test_names_in_what_is_no_directory_are_not_found(root):
    assert names_inside(root) == {"inner"}
    for path in (root / "inner" / "file", Path("/nowhere/at/all")):
        with pytest.raises(CheckpointNotFoundError):
            names_inside(path)
