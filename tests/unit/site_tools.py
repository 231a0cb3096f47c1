"""Stand-ins for a site's tools: shell scripts in PATH that print what those would."""

import os

from mpickpt.planning.file_systems import FileSystem

USER, GROUP = 1000, 2000


def install(folder, name, script, monkeypatch):
    """Put a script that stands for a tool before all others in PATH."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return path


def printing(text, code=0):
    """Return a script that prints a text."""
    return f"cat <<'END'\n{text}\nEND\nexit {code}"


def be_user(monkeypatch, user=USER, group=GROUP):
    """Have the library take this process for an ordinary user's."""
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(os, "getegid", lambda: group)


def stands_for(kind, directory, source="fs0"):
    """Return what the library would find if the directory lay on such a file system."""
    return FileSystem(
        kind=kind,
        type=kind,
        magic=0,
        point=str(directory),
        source=source,
        block_nbytes=4096,
    )
