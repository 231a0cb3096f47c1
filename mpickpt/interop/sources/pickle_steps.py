"""The instructions of a pickle that the restricted unpickler knows; pure.

Those that protocols 2 to 5 write for data. Missing are the ones that load by name from
a registry, make instances the old way, share buffers, or shuffle the stack.
"""

import struct
from collections.abc import Callable
from typing import Any

from mpickpt.interop.sources.pickle_machine import MARK, Machine, Steps, checked_key


def _constant(value: Any) -> Callable[[Machine], None]:
    return lambda machine: machine.stack.append(value)


def _tuple_of(count: int) -> Callable[[Machine], None]:
    def step(machine: Machine) -> None:
        items = machine.stack[-count:]
        if len(items) < count or MARK in items:
            raise ValueError(f"fewer than {count} items for a tuple")
        del machine.stack[-count:]
        machine.push_container(tuple(items))

    return step


def _global(machine: Machine) -> None:
    module = machine.line()
    machine.push_global(module, machine.line())


def _stack_global(machine: Machine) -> None:
    name = machine.pop()
    machine.push_global(machine.pop(), name)


def _new_with_keywords(machine: Machine) -> None:
    keywords = machine.pop()
    machine.call(machine.pop(), keywords)


def _set_item(machine: Machine) -> None:
    value = machine.pop()
    machine.set_items([machine.pop(), value])


STEPS: Steps = {
    0x80: lambda m: _require_protocol(m.number(1)),
    0x95: lambda m: _forget(m.take(8)),  # FRAME
    0x28: lambda m: m.stack.append(MARK),
    0x29: _constant(()),
    0x74: lambda m: m.push_container(tuple(m.pop_to_mark())),
    0x85: _tuple_of(1),
    0x86: _tuple_of(2),
    0x87: _tuple_of(3),
    0x5D: lambda m: m.push_container([]),
    0x61: lambda m: m.append([m.pop()]),
    0x65: lambda m: m.append(m.pop_to_mark()),
    0x7D: lambda m: m.push_container({}),
    0x73: _set_item,
    0x75: lambda m: m.set_items(m.pop_to_mark()),
    0x8F: lambda m: m.push_container(set()),
    0x90: lambda m: m.add_items(m.pop_to_mark()),
    0x91: lambda m: m.push_container(frozenset(map(checked_key, m.pop_to_mark()))),
    0x4E: _constant(None),
    0x88: _constant(True),
    0x89: _constant(False),
    0x4A: lambda m: m.stack.append(struct.unpack("<i", m.take(4))[0]),
    0x4B: lambda m: m.stack.append(m.number(1)),
    0x4D: lambda m: m.stack.append(m.number(2)),
    0x8A: lambda m: m.integer(1),
    0x8B: lambda m: m.integer(4),
    0x47: lambda m: m.stack.append(struct.unpack(">d", m.take(8))[0]),
    0x8C: lambda m: m.text(1),
    0x58: lambda m: m.text(4),
    0x8D: lambda m: m.text(8),
    0x43: lambda m: m.stack.append(m.take(m.number(1))),
    0x42: lambda m: m.stack.append(m.take(m.number(4))),
    0x8E: lambda m: m.stack.append(m.take(m.number(8))),
    0x96: lambda m: m.stack.append(m.take(m.number(8))),
    0x63: _global,
    0x93: _stack_global,
    0x52: lambda m: m.call(m.pop(), {}),
    0x81: lambda m: m.call(m.pop(), {}),
    0x92: _new_with_keywords,
    0x62: lambda m: m.build(m.pop()),
    0x51: lambda m: m.push_persistent(m.pop()),
    0x68: lambda m: m.stack.append(m.memo[m.number(1)]),
    0x6A: lambda m: m.stack.append(m.memo[m.number(4)]),
    0x71: lambda m: m.remember(m.number(1)),
    0x72: lambda m: m.remember(m.number(4)),
    0x94: lambda m: m.remember(len(m.memo)),
}


def _forget(_: bytes) -> None:
    pass


def _require_protocol(version: int) -> None:
    if not 2 <= version <= 5:
        raise ValueError(f"protocol {version}, and 2 to 5 are known")
