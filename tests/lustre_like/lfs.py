"""Stands for `lfs` of Lustre: same arguments and output, on the stand-in's attribute.

Output is laid out as liblustreapi.c (lov_dump_user_lmm_header, lov_dump_comp_v1) and
lfs.c (showdf) of Lustre 2.15 print it. Told by the environment: LFS_LOG, a file that
the arguments are logged to, and LFS_N_OSTS.
"""

import getopt
import json
import os
import sys

from tests.lustre_like import layout_bytes
from tests.lustre_like.layout_bytes import EOF, Plain

LAYOUT = "lustre.lov"
N_OSTS = int(os.environ.get("LFS_N_OSTS", "8"))
UNITS = {"K": 10, "M": 20, "G": 30, "T": 40, "P": 50}
OST_KIB = 1 << 30


def setstripe(arguments):
    """Set the layout of a directory."""
    options, (path,) = getopt.getopt(arguments, "c:S:p:E:i:")
    components = []
    for name, value in options:
        if name == "-E" or not components:
            components.append({})
        components[-1][name] = value
    try:
        os.setxattr(path, LAYOUT, packed(components))
    except OSError as error:
        fail(f"lfs setstripe: setstripe error for '{path}': {error.strerror}")


def packed(components):
    """Return the attribute for the components that were asked for."""
    start, plain = 0, []
    for given in components:
        end = given.get("-E", "eof")
        end = EOF if end in ("eof", "-1") else size_of(end)
        plain.append(
            Plain(
                count=int(given.get("-c", 1)),
                size=size_of(given.get("-S", "4M")),
                pool=given.get("-p", ""),
                start=start,
                end=end,
            )
        )
        start = end
    is_composite = "-E" in components[0]
    return layout_bytes.pack_composite(plain) if is_composite else plain[0].pack()


def size_of(text):
    """Return bytes: "4M"."""
    shift = UNITS.get(text[-1].upper(), 0)
    return int(text[:-1] if shift else text) << shift


def getstripe(arguments):
    """Print the layout of a directory, or of a file."""
    options, (path,) = getopt.getopt(arguments, "dy")
    is_yaml = ("-y", "") in options
    try:
        value = os.getxattr(path, LAYOUT)
    except OSError:
        # The default of the file system, which the client knows from its settings.
        value = Plain(count=1, size=1 << 20).pack()
    print(shown(value, is_yaml=is_yaml, is_dir=os.path.isdir(path)))


def shown(value, *, is_yaml, is_dir):
    """Return what is printed for a layout."""
    components = layout_bytes.unpack(value)
    if not layout_bytes.is_composite(value):
        return shown_fields(components[0], "", is_yaml=is_yaml, is_dir=is_dir) + "\n"
    lines = [
        "  lcm_layout_gen:    0",
        "  lcm_mirror_count:  1",
        f"  lcm_entry_count:   {len(components)}",
    ]
    for number, part in enumerate(components):
        end = "EOF" if part.end == EOF else part.end
        lines += [f"  component{number}:"] if is_yaml else []
        lines += [
            "    lcme_id:             N/A",
            "    lcme_mirror_id:      N/A",
            "    lcme_flags:          0",
            f"    lcme_extent.e_start: {part.start}",
            f"    lcme_extent.e_end:   {end}",
        ]
        lines += ["    sub_layout:"] if is_yaml else []
        lines += [shown_fields(part, " " * 6, is_yaml=is_yaml, is_dir=is_dir), ""]
    return "\n".join(lines)


def shown_fields(part, space, *, is_yaml, is_dir):
    """Return count, size, pattern, first OST and pool, in a line for a directory."""
    prefix = space + ("" if is_dir else "lmm_")
    fields = [
        f"{prefix}stripe_count:  {part.count}",
        f"{prefix}stripe_size:   {part.size}",
        f"{prefix}pattern:       raid0",
        f"{prefix}stripe_offset: {part.offset}",
        *([f"{prefix}pool:          {part.pool}"] if part.pool else []),
    ]
    return (" " if is_dir and not is_yaml else "\n").join(fields)


def df(arguments):
    """Print the space of each target."""
    _, (path,) = getopt.getopt(arguments, "lp:")
    point = mount_of(path)
    print(row("UUID", "1K-blocks", "Used", "Available", "Use%", "Mounted on"))
    print(
        row("scratch-MDT0000_UUID", 4297448, 10240, 4287208, "  1%", f"{point}[MDT:0]")
    )
    for n in range(N_OSTS):
        used = (n + 1) << 20
        place = f"{point}[OST:{n}]" + (" D" if n == 1 else "")
        uuid = f"scratch-OST{n:04x}_UUID"
        print(row(uuid, OST_KIB, used, OST_KIB - used, "  1%", place))
    total = N_OSTS * OST_KIB
    print(f"\n{row('filesystem_summary:', total, 0, total, '  0%', point)}\n")


def row(uuid, total, used, free, share, place):
    """Return a line of `lfs df`."""
    return f"{uuid:<20} {total!s:>11} {used!s:>11} {free!s:>11} {share:>4} {place}"


def mount_of(path):
    """Return where the file system of a path is mounted."""
    while not os.path.ismount(path):
        path = os.path.dirname(path)
    return path


def osts(arguments):
    """Print the targets."""
    print("OBDS:")
    for n in range(N_OSTS):
        print(f"{n}: scratch-OST{n:04x}_UUID ACTIVE")


def fail(text):
    """End as a command that fails."""
    print(text, file=sys.stderr)
    sys.exit(1)


def main():
    """Run one command."""
    name, *arguments = sys.argv[1:]
    if log := os.environ.get("LFS_LOG"):
        with open(log, "a") as lines:
            lines.write(json.dumps(sys.argv[1:]) + "\n")
    if name == "--version":
        print("lfs 2.15.5")
        return
    commands = {"setstripe": setstripe, "getstripe": getstripe, "df": df, "osts": osts}
    if name not in commands:
        fail(f"lfs: '{name}' is not a valid command. See 'lfs --list-commands'.")
    commands[name](arguments)


if __name__ == "__main__":
    main()
