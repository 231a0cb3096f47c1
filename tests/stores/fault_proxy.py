"""A proxy before a store that cuts, delays, damages and refuses requests on purpose."""

import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

LOOPBACK = "127.0.0.1"

_CHUNK_NBYTES = 1 << 16
_HOP_BY_HOP = ("connection:", "expect:")


@dataclass(slots=True, kw_only=True)
class Request:
    """A request as the proxy has seen it.

    Attributes
    ----------
    nbytes : int
        Bytes of its body that have come.
    """

    method: str
    target: str
    nbytes: int = 0

    @property
    def is_part(self) -> bool:
        """Whether it sends a part of a multipart upload."""
        return self.method == "PUT" and "partNumber=" in self.target


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What is done to a request.

    Attributes
    ----------
    status, body : int, str
        Answered instead of the store.
    cut_body_at, cut_answer_at : int or None
        The connection is reset after so many bytes of the request's body, or ends after
        so many of the answer, which the store has given.
    flips : bool
        One bit of the body is turned.
    is_silent : bool
        No answer comes.
    pause_s : float
        Before each piece of the answer.
    """

    status: int = 0
    body: str = ""
    cut_body_at: int | None = None
    cut_answer_at: int | None = None
    flips: bool = False
    is_silent: bool = False
    pause_s: float = 0.0


def s3_error(status: int, code: str) -> Fault:
    """Return an answer as S3 refuses."""
    body = (
        f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>-</Message></Error>"
    )
    return Fault(status=status, body=body)


@dataclass(slots=True)
class FaultProxy:
    """Forwards to a port of the loopback.

    Attributes
    ----------
    decide : callable
        Says what is to be done to a request; None forwards it.
    on_body : callable
        Told of the bytes of every piece of a body that has come.
    requests : list of Request
        All that came, in order.
    """

    upstream: int
    decide: Callable[[Request], Fault | None] = lambda request: None
    on_body: Callable[[Request, int], None] = lambda request, nbytes: None
    requests: list[Request] = field(default_factory=list)
    port: int = 0
    closed: threading.Event = field(default_factory=threading.Event)

    @property
    def endpoint(self) -> str:
        """Its URL."""
        return f"http://{LOOPBACK}:{self.port}"

    @property
    def nbytes_of_parts(self) -> int:
        """Bytes of parts that have come, in all."""
        return sum(request.nbytes for request in self.requests if request.is_part)


@contextmanager
def fault_proxy(upstream: int) -> Iterator[FaultProxy]:
    """Run a proxy before a port of the loopback."""
    proxy = FaultProxy(upstream)
    with socket.create_server((LOOPBACK, 0), backlog=64) as listener:
        proxy.port = listener.getsockname()[1]
        accepting = threading.Thread(target=_accept, args=(proxy, listener))
        accepting.start()
        try:
            yield proxy
        finally:
            proxy.closed.set()
            listener.shutdown(socket.SHUT_RDWR)
            accepting.join()


def _accept(proxy: FaultProxy, listener: socket.socket) -> None:
    while not proxy.closed.is_set():
        try:
            client, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=_serve, args=(proxy, client), daemon=True).start()


def _serve(proxy: FaultProxy, client: socket.socket) -> None:
    """Pass on one request and its answer; then the connection ends."""
    with client:
        try:
            head, rest = _read_head(client)
            if not head:
                return
            method, target, _ = head.split("\r\n", 1)[0].split(" ", 2)
            request = Request(method=method, target=target)
            proxy.requests.append(request)
            _Exchange(proxy, request, client, head, rest).run()
        except OSError:
            return


@dataclass(slots=True)
class _Exchange:
    proxy: FaultProxy
    request: Request
    client: socket.socket
    head: str
    rest: bytes

    def run(self) -> None:
        fault = self.proxy.decide(self.request) or Fault()
        if "100-continue" in self.head.lower():
            self.client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        if fault.status:
            for _ in self.body():
                pass
            self.answer(fault.status, fault.body)
            return
        with socket.create_connection((LOOPBACK, self.proxy.upstream)) as server:
            server.sendall(self.head_to_pass_on())
            for piece in self.body():
                cut_at = fault.cut_body_at
                if cut_at is not None and self.request.nbytes >= cut_at:
                    reset(self.client)
                    reset(server)
                    return
                server.sendall(_flipped(piece) if fault.flips else piece)
            if fault.is_silent:
                self.proxy.closed.wait(60)
                return
            self.pass_back(server, fault)

    def body(self) -> Iterator[bytes]:
        match = re.search(r"(?im)^content-length:\s*(\d+)", self.head)
        missing, piece = int(match[1]) if match else 0, self.rest
        while missing > 0:
            piece = piece or self.client.recv(min(_CHUNK_NBYTES, missing))
            if not piece:
                raise ConnectionResetError
            missing -= len(piece)
            self.request.nbytes += len(piece)
            self.proxy.on_body(self.request, len(piece))
            yield piece
            piece = b""

    def head_to_pass_on(self) -> bytes:
        lines = self.head.split("\r\n")
        kept = [line for line in lines if not line.lower().startswith(_HOP_BY_HOP)]
        return "\r\n".join([*kept, "Connection: close", "", ""]).encode("latin-1")

    def pass_back(self, server: socket.socket, fault: Fault) -> None:
        nbytes = 0
        size = _CHUNK_NBYTES if fault.cut_answer_at is None else fault.cut_answer_at + 1
        while piece := server.recv(size if not fault.pause_s else 1024):
            if fault.pause_s:
                self.proxy.closed.wait(fault.pause_s)
            nbytes += len(piece)
            if fault.cut_answer_at is not None and nbytes > fault.cut_answer_at:
                self.client.sendall(piece[: fault.cut_answer_at - nbytes])
                return
            self.client.sendall(piece)

    def answer(self, status: int, body: str) -> None:
        head = f"HTTP/1.1 {status} -\r\nContent-Length: {len(body)}\r\n"
        head += "Content-Type: application/xml\r\nConnection: close\r\n\r\n"
        self.client.sendall((head + body).encode())


def reset(connection: socket.socket) -> None:
    """Close a connection so that the other side sees a reset, at once."""
    linger = struct.pack("ii", 1, 0)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    connection.close()


def _read_head(client: socket.socket) -> tuple[str, bytes]:
    came = b""
    while b"\r\n\r\n" not in came:
        piece = client.recv(_CHUNK_NBYTES)
        if not piece:
            return "", b""
        came += piece
    head, _, rest = came.partition(b"\r\n\r\n")
    return head.decode("latin-1"), rest


def _flipped(piece: bytes) -> bytes:
    return bytes([piece[0] ^ 1]) + piece[1:]
