"""The client's side of a server-sent event stream: bytes in, `data:` payloads out."""

from __future__ import annotations


class EventReader:
    """A feed machine. Comments and other fields are skipped; events may be cut anywhere."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads of the data lines that `data` completes, in order."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [
            line[5:].strip()  # a line may end in \r\n, and the blank after the colon is optional
            for line in lines
            if line.startswith(b"data:")
        ]
