"""The stack machine of the restricted unpickler: data in, data out; no I/O."""

from collections.abc import Callable, Mapping
from typing import Any

from mpickpt.errors import ManifestError
from mpickpt.interop.sources.stubs import NotDataError, Stub, StubDict

Allowlist = Mapping[tuple[str, str], Any]
Steps = Mapping[int, "Callable[[Machine], None]"]

MARK = object()
STOP = 0x2E

_MOST_INT_NBYTES = 1024
# An integer is its own hash up to here, so that keys cannot be made to collide.
_MOST_KEY = 1 << 60
_PLAIN_KEYS = (str, bytes, bool, type(None))
# Names that Python 2 had, and protocol 2 still writes.
_OLD_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg"}


class Machine:
    """A stack, a memo and what stands for globals.

    Parameters
    ----------
    pickled : bytes
        The program.
    allow : mapping of (module, name) to object
        What stands for each global.
    persistent_load : callable or None
        Gives what a persistent id stands for.
    where : str
        For errors.

    Attributes
    ----------
    position : int
        Of the next byte, while an instruction is carried out.
    """

    def __init__(
        self,
        pickled: bytes,
        allow: Allowlist,
        persistent_load: Callable[[Any], Any] | None,
        where: str,
    ) -> None:
        self.pickled = pickled
        self.position = 0
        self.allow = allow
        self.callables: set[int] = set()
        self.persistent_load = persistent_load
        self.where = where
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        # Real ones have a container in three bytes or more; an empty list is one byte.
        self.containers_left = 4096 + len(pickled) // 2

    def run(self, steps: Steps) -> Any:
        """Carry out the instructions; return what they leave."""
        stack, memo, pickled = self.stack, self.memo, self.pickled
        position, end = 0, len(pickled)
        while position < end:
            code = pickled[position]
            position += 1
            # Two thirds of the instructions of metadata are these.
            if code == 0x94 and stack[-1] is not MARK:  # MEMOIZE
                memo[len(memo)] = stack[-1]
            elif code == 0x68:  # BINGET
                stack.append(memo[pickled[position]])
                position += 1
            elif code == 0x4B:  # BININT1
                stack.append(pickled[position])
                position += 1
            elif code == 0x28:  # MARK
                stack.append(MARK)
            else:
                self.position = position
                step = steps.get(code)
                if step is None:
                    return self.result(code)
                step(self)
                position = self.position
        raise ValueError("it ends before it is complete")

    def result(self, code: int) -> Any:
        """Return what is left at the end; any other instruction is refused."""
        if code != STOP:
            raise self.refused(f"instruction {bytes([code])!r}")
        if self.position != len(self.pickled) or len(self.stack) != 1:
            raise ValueError("something is left over after its end")
        return self.pop()

    def refused(self, what: str) -> ManifestError:
        """Return the error that says what was asked for."""
        return ManifestError(
            f"{self.where} has a pickle that asks for {what}, which is not among what "
            "a checkpoint needs to be read as data; nothing was run and nothing "
            "imported. If you trust the file, write it anew with the framework, with "
            "plain values and tensors alone"
        )

    def take(self, nbytes: int) -> bytes:
        """Return the next bytes of the program."""
        start = self.position
        taken = self.pickled[start : start + nbytes]
        if len(taken) != nbytes:
            raise ValueError(f"{nbytes} bytes are announced and fewer are there")
        self.position = start + nbytes
        return taken

    def number(self, nbytes: int) -> int:
        """Return the next bytes as a count."""
        return int.from_bytes(self.take(nbytes), "little")

    def line(self) -> str:
        """Return the text up to the end of the line."""
        stop = self.pickled.index(b"\n", self.position, self.position + 1024)
        text = self.pickled[self.position : stop].decode("utf-8")
        self.position = stop + 1
        return text

    def text(self, length_nbytes: int) -> None:
        """Push a text whose length is a number of so many bytes."""
        taken = self.take(self.number(length_nbytes))
        self.stack.append(taken.decode("utf-8", "surrogatepass"))

    def integer(self, length_nbytes: int) -> None:
        """Push an integer whose length is a number of so many bytes."""
        nbytes = self.number(length_nbytes)
        if nbytes > _MOST_INT_NBYTES:
            raise ValueError(f"an integer of {nbytes} bytes")
        self.stack.append(int.from_bytes(self.take(nbytes), "little", signed=True))

    def pop(self) -> Any:
        """Return the last value."""
        value = self.stack.pop()
        if value is MARK:
            raise ValueError("a mark where a value is expected")
        return value

    def pop_to_mark(self) -> list[Any]:
        """Return the values since the last mark."""
        stack = self.stack
        index = len(stack) - 1
        while stack[index] is not MARK:
            index -= 1
            if index < 0:
                raise ValueError("no mark on the stack")
        items = stack[index + 1 :]
        del stack[index:]
        return items

    def push_container(self, value: Any) -> None:
        """Push something that takes memory, of which there is a limit."""
        self.containers_left -= 1
        if self.containers_left < 0:
            raise ValueError("more containers than a pickle of this size can need")
        self.stack.append(value)

    def remember(self, index: int) -> None:
        """Note the last value in the memo."""
        if self.stack[-1] is MARK:
            raise ValueError("a mark where a value is expected")
        self.memo[index] = self.stack[-1]

    def append(self, items: list[Any]) -> None:
        """Append to the list at the end."""
        target = self.stack[-1]
        if type(target) is not list:
            raise TypeError(f"items for a {type(target).__name__}")
        target.extend(items)

    def set_items(self, items: list[Any]) -> None:
        """Set keys and values of the dict at the end."""
        target = self.stack[-1]
        if type(target) is not dict and type(target) is not StubDict:
            raise TypeError(f"items for a {type(target).__name__}")
        if len(items) % 2:
            raise ValueError("a key without a value")
        for index in range(0, len(items), 2):
            target[checked_key(items[index])] = items[index + 1]

    def add_items(self, items: list[Any]) -> None:
        """Add to the set at the end."""
        target = self.stack[-1]
        if type(target) is not set:
            raise TypeError(f"items for a {type(target).__name__}")
        target.update(map(checked_key, items))

    def push_global(self, module: Any, name: Any) -> None:
        """Push what stands for a global."""
        if type(module) is not str or type(name) is not str:
            raise TypeError("a global without a name")
        key = (_OLD_MODULES.get(module, module), name)
        if key not in self.allow:
            raise self.refused(f"{module}.{name}")
        found = self.allow[key]
        if callable(found):
            self.callables.add(id(found))
        self.stack.append(found)

    def call(self, arguments: Any, keywords: Any) -> None:
        """Call what stands for a global that was pushed."""
        function = self.pop()
        if id(function) not in self.callables:
            raise self.refused(f"a call of a {type(function).__name__}")
        if type(arguments) is not tuple or type(keywords) is not dict:
            raise TypeError("arguments that are no tuple")
        try:
            made = function(*arguments, **keywords)
        except NotDataError as error:
            raise self.refused(str(error)) from None
        if type(made) is bytes:
            # Made from a text that may be named over and over by one byte each.
            self.containers_left -= len(made) // 16
        self.push_container(made)

    def build(self, state: Any) -> None:
        """Give the stub at the end its state."""
        target = self.stack[-1]
        if isinstance(target, Stub):
            target.set_state(state)
        elif type(target) is not StubDict:
            raise self.refused(f"attributes of a {type(target).__name__}")

    def push_persistent(self, identifier: Any) -> None:
        """Push what a persistent id stands for."""
        if self.persistent_load is None:
            raise self.refused("something stored outside of it")
        if type(identifier) is not tuple or not all(map(_is_short, identifier)):
            raise TypeError("a persistent id that is no tuple of names and numbers")
        self.stack.append(self.persistent_load(identifier))


def _is_short(part: Any) -> bool:
    if isinstance(part, list | tuple | dict | set | frozenset | bytes):
        return False
    return type(part) is not str or len(part) <= 1024


def checked_key(key: Any) -> Any:
    """Return a key of a dict that is cheap to hash, or raise TypeError."""
    kind = type(key)
    if kind in _PLAIN_KEYS:
        return key
    if kind is int:
        if -_MOST_KEY < key < _MOST_KEY:
            return key
        raise TypeError("a large integer as a key")
    if kind is tuple and len(key) <= 64:
        for item in key:
            if type(item) is tuple:
                raise TypeError("a nested tuple as a key")
            checked_key(item)
        return key
    if isinstance(key, Stub):
        return checked_key(key.as_key())
    raise TypeError(f"a key of type {kind.__name__}")
