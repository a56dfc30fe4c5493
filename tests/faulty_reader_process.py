"""The reader process with a drive that does what `faulty_drives.ChildDrive` says. Not for the test process itself."""

import json
import os
import random
import sys
import time
from itertools import count
from pathlib import Path

from runtime.experts import reader_process
from runtime.units import PAGE_NBYTES

FOLDER = Path(sys.argv.pop(1))
RNG = random.Random(0)
READS = count()


def preadv(fd, buffers, offset):
    state = json.loads((FOLDER / "state").read_text())
    inode, (buffer,) = os.fstat(fd).st_ino, buffers
    pages = {(inode, page) for page in range(offset, offset + len(buffer), PAGE_NBYTES)}
    is_gated = bool(pages & {tuple(page) for page in state["gated"]})
    if is_gated:
        (FOLDER / "waiting").touch()
        while not (FOLDER / "gate").exists():
            time.sleep(0.001)
    time.sleep(RNG.random() * state["delay_s"])
    if pages & {tuple(page) for page in state["bad"]}:
        raise OSError(state.get("errno", 5), os.strerror(state.get("errno", 5)))
    if state.get("mistake"):
        raise ZeroDivisionError
    got = os.preadv(fd, buffers, offset)
    if state.get("noise_after") is not None and next(READS) >= state["noise_after"]:
        buffer[:16] = b"\xa5" * 16
    least = state.get("short_nbytes")
    if least is not None:  # fewer bytes than asked for, and noise behind them
        got = min(got, RNG.randint(least, least + 2 * PAGE_NBYTES))
        buffer[got:] = b"\xa5" * (len(buffer) - got)
    if is_gated:
        (FOLDER / "through").touch()
    return got


if json.loads((FOLDER / "state").read_text()).get("refuses_direct"):
    real = os.open

    def refusing(path, flags, *args, **kwargs):
        if flags & os.O_DIRECT:
            raise OSError(22, os.strerror(22))
        return real(path, flags, *args, **kwargs)

    os.open = refusing

reader_process.main(preadv)
