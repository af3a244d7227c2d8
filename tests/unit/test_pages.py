"""Memory given back once a process is ready."""

from __future__ import annotations

import subprocess
import sys

import pytest

from headrace.pages import clean_code

SMAPS = """\
7f0000000000-7f0000010000 r-xp 00001000 08:01 77                         /lib/clean code.so
Rss:                  64 kB
Anonymous:             0 kB
7f0000010000-7f0000020000 r-xp 00001000 08:01 78                         /lib/relocated.so
Anonymous:             4 kB
7f0000020000-7f0000030000 r--p 00001000 08:01 79                         /lib/constants.so
Anonymous:             0 kB
7f0000030000-7f0000040000 r-xp 00000000 00:00 0                          [vdso]
Anonymous:             0 kB
7f0000040000-7f0000050000 r-xp 00000000 00:00 0
Anonymous:             0 kB
7f0000050000-7f0000060000 rw-p 00001000 08:01 77                         /lib/clean code.so
Anonymous:             0 kB
"""


def test_only_unchanged_code_of_files_goes() -> None:
    assert list(clean_code(SMAPS.splitlines())) == [(0x7F0000000000, 0x7F0000010000)]


FILE_KB = """
import sys
from headrace.pages import give_back
{imports}
def file_kb():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(l.split()[1]) for l in lines if l.startswith("RssFile:"))
before = file_kb()
give_back()
after = file_kb()
assert {check}
print(before, after)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="proc(5) is Linux's")
def test_code_that_ran_goes_and_comes_back() -> None:
    code = FILE_KB.format(
        imports="import asyncio, decimal, sqlite3, ssl",
        check="str(decimal.Decimal(2).sqrt()).startswith('1.41421')",
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, after = map(int, ran.stdout.split())
    assert after < 0.8 * before
