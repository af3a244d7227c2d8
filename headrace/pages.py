"""Memory that only a start needs goes back to the system.

Importing torch runs tens of megabytes of code once. Those pages are clean: whoever needs one later
finds it in the page cache again, at the price of a minor fault.
"""

from __future__ import annotations

import ctypes
import gc
import re
import sys
from collections.abc import Iterable, Iterator

MADV_DONTNEED = 4  # sys/mman.h
_HEAD = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) r-xp \S+ \S+ [1-9]\d* +/")
_ANY_HEAD = re.compile(r"^[0-9a-f]+-[0-9a-f]+ ")


def clean_code(smaps: Iterable[str]) -> Iterator[tuple[int, int]]:
    """(start, end) of the mappings of libraries' code in proc(5)'s smaps, none of whose pages is
    changed: a changed page is not in the file, so it must stay."""
    found: tuple[int, int] | None = None
    for line in smaps:
        if _ANY_HEAD.match(line):
            head = _HEAD.match(line)
            found = (int(head[1], 16), int(head[2], 16)) if head else None
        elif found and line.startswith("Anonymous:") and line.split()[1] == "0":
            yield found


def give_back() -> None:
    """Call once a process is ready: free heap and code that has run go, on Linux. What is there now
    stays to the end, so the search for garbage, which stops all work, passes it from now on."""
    gc.freeze()
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # glibc
        libc.malloc_trim(0)
    try:
        with open("/proc/self/smaps") as smaps:
            mappings = list(clean_code(smaps))
    except OSError:
        return
    for start, end in mappings:
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_DONTNEED)
