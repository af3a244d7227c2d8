"""A subscriber of KV events as others write them: vLLM's own frames, nothing of ours."""

from __future__ import annotations

from typing import Any

import msgspec
import zmq

PATIENCE_MS = 20_000
END = 2**64 - 1


class PlainSubscriber:
    """`with PlainSubscriber(endpoint, replay_endpoint) as subscriber`."""

    def __init__(self, endpoint: str, replay_endpoint: str = "", topic: bytes = b"") -> None:
        self._endpoint, self._replay_endpoint, self._topic = endpoint, replay_endpoint, topic

    def __enter__(self) -> PlainSubscriber:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.sub = self._context.socket(zmq.SUB)
        self.sub.setsockopt(zmq.SUBSCRIBE, self._topic)
        self.sub.connect(self._endpoint)
        self.sub.setsockopt(zmq.RCVTIMEO, PATIENCE_MS)
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    def next(self) -> tuple[bytes, int, Any]:
        """Topic, number, batch."""
        topic, number, payload = self.sub.recv_multipart()
        return topic, int.from_bytes(number, "big"), msgspec.msgpack.decode(payload)

    def replay(self, first: int) -> list[tuple[int, Any]]:
        """Numbers and batches from `first` on."""
        line = self._context.socket(zmq.DEALER)
        line.setsockopt(zmq.RCVTIMEO, PATIENCE_MS)
        line.connect(self._replay_endpoint)
        line.send_multipart([b"", first.to_bytes(8, "big")])
        out: list[tuple[int, Any]] = []
        while True:
            empty, number, payload = line.recv_multipart()
            assert empty == b""
            if int.from_bytes(number, "big") == END:
                assert payload == b""
                line.close()
                return out
            out.append((int.from_bytes(number, "big"), msgspec.msgpack.decode(payload)))
