"""The JSON of a state tree, as it stands in a shard's index.

JSON holds str, bool, None, finite floats and small ints as themselves; everything
else is an object with one key that begins with "$", so that it comes back exactly.
"""

import base64
import math
import struct
from typing import Any, ClassVar

import numpy as np

from mpickpt.errors import ManifestError
from mpickpt.format.dtypes import clear_padding, dtype_name, parse_dtype
from mpickpt.format.naming import escape_component
from mpickpt.format.tree import (
    MAX_DEPTH,
    ArrayNode,
    DictNode,
    Key,
    ListNode,
    LiveNode,
    Node,
    Plain,
    RecordNode,
    SavedLeaf,
    ScopeNode,
    VariesNode,
)
from mpickpt.state import CHECKS, RESIZE_RULES

_SMALL_INT = 2**53  # every JSON reader keeps integers up to here exact (RFC 8259, 6)


def encode_tree(node: Node) -> Any:
    """Return the tree as values that JSON can hold."""
    return _ENCODERS[type(node)](node)


def decode_tree(document: Any, n_arrays: int | None, *, where: str) -> Node:
    """Return the tree that a JSON value describes.

    Parameters
    ----------
    document : object
        Parsed JSON.
    n_arrays : int or None
        Number of array records beside it; ordinals must be below. None for a tree
        from another rank, whose leaves are `SavedLeaf` and `VariesNode`; those are
        never on disk.
    where : str
        The file, for messages.

    Raises
    ------
    ManifestError
        A form that no writer of this format produces, or nesting above 100.
    """
    return _Decoder(n_arrays, where).node(document, 0)


def _encode_plain(node: Plain) -> Any:
    value = node.value
    if value is None or value is True or value is False:
        return value
    kind = type(value)
    if kind is int:
        small = -_SMALL_INT <= value <= _SMALL_INT
        return value if small else {"$int": hex(value)}
    if kind is float:
        exact = math.isfinite(value)
        return value if exact else {"$float": struct.pack(">d", value).hex()}
    if kind is str:
        return _encode_text(value)
    if kind is complex:
        return {"$complex": struct.pack(">dd", value.real, value.imag).hex()}
    if kind is bytes:
        return {"$bytes": _base64(value)}
    return _encode_scalar(value)


def _encode_scalar(value: Any) -> Any:
    # As an array, because numpy has empty text as a scalar, but not as an element.
    element = np.array(value).reshape(1)
    content = element.view(np.uint8)
    clear_padding(content, element.dtype)
    return {"$numpy": [dtype_name(element.dtype), _base64(content.tobytes())]}


def _encode_text(text: str) -> Any:
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate: legal in Python, not in UTF-8
        return {"$str": _base64(text.encode("utf-8", "surrogatepass"))}
    return text


def _encode_key(key: Key) -> Any:
    return _encode_text(key) if isinstance(key, str) else _encode_plain(Plain(key))


def _encode_items(items: tuple[tuple[Key, Node], ...]) -> list[Any]:
    return [[_encode_key(key), encode_tree(child)] for key, child in items]


def _encode_dict(node: DictNode) -> Any:
    if all(_is_simple_key(key) for key, _ in node.items):
        return {key: encode_tree(child) for key, child in node.items}
    return {"$dict": _encode_items(node.items)}


def _is_simple_key(key: Key) -> bool:
    return (
        isinstance(key, str)
        and not key.startswith("$")
        and isinstance(_encode_text(key), str)
    )


def _encode_list(node: ListNode) -> Any:
    items = [encode_tree(child) for child in node.items]
    return items if node.form == "list" else {"$tuple": items}


_ENCODERS: dict[type, Any] = {
    Plain: _encode_plain,
    ArrayNode: lambda node: {"$array": node.ordinal},
    DictNode: _encode_dict,
    ListNode: _encode_list,
    RecordNode: lambda node: {"$record": [node.name, _encode_items(node.items)]},
    ScopeNode: lambda node: {
        "$" + node.wrapper: [node.option, encode_tree(node.child)]
    },
    LiveNode: lambda node: {"$live": [node.name, encode_tree(node.child)]},
    VariesNode: lambda node: {"$varies": None},
    SavedLeaf: lambda node: {
        "$leaf": [node.key, node.kind, node.dtype, list(node.shape), node.bare]
    },
}


class _Decoder:
    """Turns JSON values into nodes; refuses whatever the encoder never writes."""

    WRAPPERS: ClassVar[dict[str, tuple[str, ...]]] = {
        "$replicated": CHECKS,
        "$per_rank": RESIZE_RULES,
    }

    def __init__(self, n_arrays: int | None, where: str) -> None:
        self.n_arrays = n_arrays
        self.where = where

    def node(self, document: Any, depth: int) -> Node:
        if depth > MAX_DEPTH:
            raise self.refuse(f"nesting above {MAX_DEPTH}")
        if isinstance(document, list):
            return ListNode(tuple(self.node(child, depth + 1) for child in document))
        if not isinstance(document, dict):
            return Plain(document)
        tag = next((key for key in document if key.startswith("$")), None)
        if tag is None:
            items = document.items()
            return DictNode(tuple((k, self.node(v, depth + 1)) for k, v in items))
        if len(document) != 1:
            raise self.refuse(f"{tag!r} beside other keys")
        return self.tagged(tag, document[tag], depth)

    def tagged(self, tag: str, body: Any, depth: int) -> Node:
        try:
            return self._tagged(tag, body, depth)
        except (ValueError, TypeError, KeyError, IndexError, struct.error) as error:
            if isinstance(error, ManifestError):
                raise
            raise self.refuse(f"{tag!r} with a body that does not fit: {error}") from (
                error
            )

    def _tagged(self, tag: str, body: Any, depth: int) -> Node:
        if tag == "$array":
            return self.array(body)
        if tag == "$tuple":
            items = self.listed(body)
            return ListNode(tuple(self.node(v, depth + 1) for v in items), "tuple")
        if tag == "$dict":
            return DictNode(self.items(body, depth))
        if tag == "$record":
            name, items = self.listed(body, 2)
            return RecordNode(self.text(name), self.items(items, depth))
        if tag == "$live":
            name, child = self.listed(body, 2)
            return LiveNode(self.text(name), self.node(child, depth + 1))
        if tag in self.WRAPPERS:
            option, child = self.listed(body, 2)
            if option not in self.WRAPPERS[tag]:
                raise self.refuse(f"{tag!r} with the option {option!r}")
            return ScopeNode(tag[1:], option, self.node(child, depth + 1))
        if tag == "$varies" and self.n_arrays is None:
            return VariesNode()
        if tag == "$leaf" and self.n_arrays is None:
            key, kind, dtype, shape, bare = self.listed(body, 5)
            return SavedLeaf(key, kind, dtype, tuple(shape), bare)
        return Plain(self.scalar(tag, body))

    def array(self, ordinal: Any) -> ArrayNode:
        n_arrays = self.n_arrays or 0
        if type(ordinal) is not int or not 0 <= ordinal < n_arrays:
            raise self.refuse(f"array ordinal {ordinal!r} of {n_arrays}")
        return ArrayNode(ordinal)

    def items(self, body: Any, depth: int) -> tuple[tuple[Key, Node], ...]:
        pairs = [self.listed(pair, 2) for pair in self.listed(body)]
        items = tuple((self.key(k), self.node(v, depth + 1)) for k, v in pairs)
        if len({key for key, _ in items}) != len(items):
            raise self.refuse("a dict with one key twice")
        return items

    def key(self, document: Any) -> Key:
        node = self.node(document, 0)
        if isinstance(node, Plain) and type(node.value) in (str, int):
            escape_component(node.value)  # Python writes no int of 4,301 digits
            return node.value  # type: ignore[no-any-return]
        raise self.refuse(f"dict key {document!r}")

    def scalar(self, tag: str, body: Any) -> Any:
        if tag == "$int":
            return int(self.text(body), 16)
        if tag == "$float":
            return struct.unpack(">d", bytes.fromhex(body))[0]
        if tag == "$complex":
            return complex(*struct.unpack(">dd", bytes.fromhex(body)))
        if tag == "$bytes":
            return base64.b64decode(self.text(body), validate=True)
        if tag == "$str":
            return base64.b64decode(self.text(body)).decode("utf-8", "surrogatepass")
        if tag == "$numpy":
            name, content = self.listed(body, 2)
            content = base64.b64decode(self.text(content), validate=True)
            return _numpy_scalar(parse_dtype(self.text(name)), content)
        raise self.refuse(f"unknown form {tag!r}")

    def listed(self, body: Any, length: int | None = None) -> list[Any]:
        if not isinstance(body, list) or length not in (None, len(body)):
            raise self.refuse(f"expected a list, got {type(body).__name__}")
        return body

    def text(self, body: Any) -> str:
        if not isinstance(body, str):
            raise self.refuse(f"expected text, got {type(body).__name__}")
        return body

    def refuse(self, what: str) -> ManifestError:
        return ManifestError(
            f"{self.where}: the state tree has {what}; it was not written by mpickpt, "
            "or by a newer one"
        )


def _numpy_scalar(dtype: np.dtype[Any], content: bytes) -> Any:
    if len(content) != dtype.itemsize:
        raise ValueError(f"{len(content)} bytes for one {dtype}")
    return np.frombuffer(content, dtype)[0]


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()
