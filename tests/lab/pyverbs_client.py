"""A petps client over RDMA in pure Python (Debian's python3-pyverbs). It checks the other clients.

It shares no code with client/cpp: it and its frames (tests/system/frames.py) were written from
native/wire/FORMAT.md and native/transport/rdma/RDMA.md. It has one connection, one thread, and one
request at a time.
"""

from __future__ import annotations

import importlib
import ipaddress
import socket
import struct
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.system.frames import (
    PULL,
    RDMA,
    Connection,
    Keys,
    Mask,
    decode_pull,
    encode_frame,
    encode_pull,
    read_reply,
)

QUEUE_PAIR = struct.Struct("<IIHBB16s")
LINE = 64
LAST = 1 << 31
DEBIAN = Path("/usr/lib/python3/dist-packages/pyverbs")


class Unavailable(Exception):
    """pyverbs or an RDMA device is missing; the text names which."""


def load() -> dict[str, Any]:
    """Return pyverbs' modules by name. Raise Unavailable if pyverbs cannot be imported.

    In a virtual environment, link Debian's pyverbs alone into the module path.
    """
    try:
        importlib.import_module("pyverbs")
    except ImportError:
        if not DEBIAN.is_dir():
            raise Unavailable("no pyverbs: apt-get install python3-pyverbs") from None
        folder = Path(tempfile.mkdtemp(prefix="pyverbs."))
        (folder / "pyverbs").symlink_to(DEBIAN)
        sys.path.append(str(folder))
    names = ("addr", "cq", "device", "enums", "mr", "pd", "qp", "wr")
    try:
        return {name: importlib.import_module(f"pyverbs.{name}") for name in names}
    except ImportError as error:
        raise Unavailable(f"pyverbs cannot be imported: {error}") from None


def first_device(verbs: dict[str, Any]) -> str:
    """Return the name of the first RDMA device. Raise Unavailable if there is none."""
    try:
        devices = verbs["device"].get_device_list()
    except Exception as error:  # pyverbs raises an error of its own if there is none
        raise Unavailable(f"no RDMA device: {error}") from None
    if not devices:
        raise Unavailable("no RDMA device")
    name: bytes | str = devices[0].name
    return name.decode() if isinstance(name, bytes) else name


class RdmaClient:
    """A client of 127.0.0.1:port. It raises Refused on an error reply, TimeoutError after 30 s."""

    def __init__(self, port: int, ring_bytes: int = 1 << 20, messages: int = 32) -> None:
        self._verbs = verbs = load()
        enums = verbs["enums"]
        self._context = verbs["device"].Context(name=first_device(verbs))
        self._pd = verbs["pd"].PD(self._context)
        self._ring_bytes, self._messages = ring_bytes, messages
        write = enums.IBV_ACCESS_LOCAL_WRITE
        self._ring = verbs["mr"].MR(self._pd, ring_bytes, write | enums.IBV_ACCESS_REMOTE_WRITE)
        self._cq = verbs["cq"].CQ(self._context, messages + 64, None, None, 0)
        cap = verbs["qp"].QPCap(32, messages, 1, 1, 0)
        init = verbs["qp"].QPInitAttr(
            qp_type=enums.IBV_QPT_RC, scq=self._cq, rcq=self._cq, cap=cap, sq_sig_all=1
        )
        self._qp = verbs["qp"].QP(self._pd, init)
        # Lines of the ring.
        self._lines_arrived = self._lines_taken = self._lines_reported = 0
        self._messages_unreported = 0
        self._messages_in: list[tuple[int, int]] = []  # (line, bytes)
        self._sends_done = 0
        self._id = 0
        self._stream = b""
        self._tcp = Connection(port)
        self._connect()

    def close(self) -> None:
        """Close the client. The server notices when the TCP connection closes."""
        for resource in (self._qp, self._cq, self._ring, self._buffers, self._pd, self._context):
            resource.close()
        self._tcp.close()

    def _connect(self) -> None:
        port = self._context.query_port(1)
        ethernet = port.link_layer == 2
        index, gid = self._choose_gid() if ethernet else (0, bytes(16))
        own = QUEUE_PAIR.pack(self._qp.qp_num, 0x1234, port.lid, port.active_mtu, 0, gid)
        ring = struct.pack(
            "<IQII", self._ring.rkey, self._ring.buf, self._ring_bytes, self._messages
        )
        body = self._tcp.ask(RDMA, own + ring)
        number, packet, lid, mtu, _, peer_gid = QUEUE_PAIR.unpack_from(body)
        self._credits, message_bytes, _ = struct.unpack_from("<III", body, QUEUE_PAIR.size)
        enums = self._verbs["enums"]
        self._message_bytes = message_bytes
        self._buffers = self._verbs["mr"].MR(
            self._pd, self._credits * message_bytes, enums.IBV_ACCESS_LOCAL_WRITE
        )
        attr = self._verbs["qp"].QPAttr()
        attr.port_num = 1
        attr.qp_access_flags = enums.IBV_ACCESS_LOCAL_WRITE | enums.IBV_ACCESS_REMOTE_WRITE
        attr.path_mtu = min(mtu, port.active_mtu)
        attr.dest_qp_num = number
        attr.rq_psn, attr.sq_psn = packet, 0x1234
        attr.min_rnr_timer, attr.timeout, attr.retry_cnt, attr.rnr_retry = 12, 14, 7, 7
        attr.max_dest_rd_atomic = attr.max_rd_atomic = 0
        address = self._verbs["addr"]
        route = None
        if ethernet:
            words = ":".join(peer_gid[i : i + 2].hex() for i in range(0, 16, 2))
            route = address.GlobalRoute(dgid=address.GID(words), sgid_index=index, hop_limit=64)
        attr.ah_attr = address.AHAttr(gr=route, is_global=int(ethernet), dlid=lid, port_num=1)
        self._qp.to_rts(attr)
        for _ in range(self._messages):
            self._post_receive()

    def _choose_gid(self) -> tuple[int, bytes]:
        """Return (index, gid) of the best entry: RoCE v2 before v1, then IPv4 before IPv6."""
        best = (-1, 0, bytes(16))
        for entry in self._context.query_gid_table(256):
            text: str = entry.gid_str()
            raw = ipaddress.IPv6Address(text).packed
            ipv4 = raw[:12] == bytes(10) + b"\xff\xff"
            rank = 2 * (entry.gid_type == 2) + ipv4
            if rank > best[0]:
                best = (rank, entry.gid_index, raw)
        return best[1], best[2]

    def _post_receive(self) -> None:
        request = self._verbs["wr"].RecvWR(wr_id=1, num_sge=1, sg=[self._piece(0)])
        request.num_sge = 0  # replies are written into the ring, but pyverbs requires an element
        self._qp.post_recv(request)

    def _piece(self, n: int) -> Any:
        """Return the first n bytes of the send buffer, as a scatter-gather element."""
        return self._verbs["wr"].SGE(self._buffers.buf, n, self._buffers.lkey)

    def _send(self, content: bytes) -> None:
        enums, wr = self._verbs["enums"], self._verbs["wr"]
        if content:
            self._buffers.write(content, len(content), 0)  # one send at a time
        request = wr.SendWR(
            wr_id=2,
            num_sge=1,
            sg=[self._piece(len(content))],
            opcode=enums.IBV_WR_SEND_WITH_IMM,
            send_flags=enums.IBV_SEND_SIGNALED,
            imm_data=socket.htonl(self._lines_taken & (LAST - 1)),
        )
        request.num_sge = int(bool(content))
        sends_before = self._sends_done
        self._qp.post_send(request)
        self._lines_reported, self._messages_unreported = self._lines_taken, 0
        self._wait(lambda: self._sends_done > sends_before)

    def _wait(self, condition: Any) -> None:
        until = time.monotonic() + 30
        while not condition():
            self._poll()
            if time.monotonic() > until:
                raise TimeoutError("no completion for 30 s")

    def _poll(self) -> None:
        _, completions = self._cq.poll(16)
        for completion in completions:
            if completion.status != 0:
                raise RuntimeError(f"the connection broke: completion status {completion.status}")
            if completion.wr_id == 2:
                self._sends_done += 1
                continue
            immediate = socket.ntohl(completion.imm_data)
            count = immediate & ((1 << 25) - 1)
            self._credits += immediate >> 25 & 63
            if count:
                self._messages_in.append((self._lines_arrived, count))
            else:
                self._lines_taken += 1
                self._messages_unreported += 1
            self._lines_arrived += max(1, -(-count // LINE))
            self._post_receive()

    def _receive(self, n: int) -> bytes:
        """Return the next `n` bytes of the stream that the messages form."""
        while len(self._stream) < n:
            self._wait(lambda: self._messages_in)
            line, count = self._messages_in.pop(0)
            offset = line * LINE % self._ring_bytes
            first = min(count, self._ring_bytes - offset)
            self._stream += self._ring.read(first, offset)
            if first < count:
                self._stream += self._ring.read(count - first, 0)
            self._lines_taken += -(-count // LINE)
            self._messages_unreported += 1
            half = (self._lines_taken - self._lines_reported) * LINE * 2 >= self._ring_bytes
            if half or self._messages_unreported * 2 >= self._messages:
                self._send(b"")
        out, self._stream = self._stream[:n], self._stream[n:]
        return out

    def pull(self, table: int, keys: Keys) -> tuple[Mask, npt.NDArray[np.uint8]]:
        """Pull keys uint64[n]. Return (found bool[n], stored rows found uint8[m, row_bytes])."""
        self._id += 1
        frame = encode_frame(PULL, self._id, encode_pull(table, keys), sections=1)
        for position in range(0, len(frame), self._message_bytes):
            self._wait(lambda: self._credits > 0)
            self._credits -= 1
            self._send(frame[position : position + self._message_bytes])
        return decode_pull(read_reply(PULL, self._id, self._receive), len(keys))
