"""A DNS server in this process, by UDP and TCP, that says what a test tells it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset

MOST_UDP_BYTES = 1232


class NameServer(asyncio.DatagramProtocol):
    """`async with NameServer() as server`. Its records may change at any time."""

    def __init__(self) -> None:
        self.records: dict[tuple[str, str], tuple[int, Sequence[str]]] = {}  # TTL, values
        self.rcode = dns.rcode.NOERROR  # else every answer is this
        self.broken: set[str] = set()  # names of which it cannot tell
        self.silent = False
        self.asked: list[tuple[str, str, str]] = []  # by udp or tcp, name, type
        self.port = 0

    def set(self, name: str, kind: str, *values: str, ttl_s: int = 0) -> None:
        """All records of a kind that the name has; none: the name may still have others."""
        self.records[name, kind] = (ttl_s, values)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def __aenter__(self) -> NameServer:
        loop = asyncio.get_running_loop()
        self._tcp = await asyncio.start_server(self._stream, "127.0.0.1", 0)
        self.port = self._tcp.sockets[0].getsockname()[1]
        self._udp, _ = await loop.create_datagram_endpoint(
            lambda: self, local_addr=("127.0.0.1", self.port)
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        self._udp.close()
        self._tcp.close()
        await self._tcp.wait_closed()

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        answer = self._answer(data, "udp")
        if answer is None:
            return
        wire = answer.to_wire(max_size=65535)
        if len(wire) > MOST_UDP_BYTES:
            answer.answer.clear()
            answer.flags |= dns.flags.TC
            wire = answer.to_wire(max_size=65535)
        self._udp.sendto(wire, addr)

    async def _stream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            size = int.from_bytes(await reader.readexactly(2), "big")
            answer = self._answer(await reader.readexactly(size), "tcp")
            if answer is not None:
                wire = answer.to_wire(max_size=65535)
                writer.write(len(wire).to_bytes(2, "big") + wire)
                await writer.drain()
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()

    def _answer(self, data: bytes, by: str) -> dns.message.Message | None:
        query = dns.message.from_wire(data)
        (question,) = query.question
        name = question.name.to_text(omit_final_dot=True)
        self.asked.append((by, name, dns.rdatatype.to_text(question.rdtype)))
        if self.silent:
            return None
        answer = dns.message.make_response(query)
        answer.set_rcode(self.rcode)
        if name in self.broken:
            answer.set_rcode(dns.rcode.SERVFAIL)
        elif self.rcode == dns.rcode.NOERROR:
            self._fill(answer, name, dns.rdatatype.to_text(question.rdtype))
        return answer

    def _fill(self, answer: dns.message.Message, name: str, kind: str) -> None:
        while (name, "CNAME") in self.records:
            ttl_s, (to,) = self.records[name, "CNAME"]
            answer.answer.append(dns.rrset.from_text(f"{name}.", ttl_s, "IN", "CNAME", f"{to}."))
            name = to
        if not any(known == name for known, _ in self.records):
            answer.set_rcode(dns.rcode.NXDOMAIN)
        ttl_s, values = self.records.get((name, kind), (0, ()))
        if values:
            answer.answer.append(dns.rrset.from_text_list(f"{name}.", ttl_s, "IN", kind, values))
