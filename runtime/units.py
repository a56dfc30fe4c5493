"""Numbers for people: GiB is 2**30 everywhere."""

GIB = 2**30
MIB = 2**20
PAGE_NBYTES = 4096  # the alignment that direct reads need, and the page of the hosts we run on


def align_down(n: int, unit: int = PAGE_NBYTES) -> int:
    """Return the largest multiple of `unit` that is not above n."""
    return n // unit * unit


def align_up(n: int, unit: int = PAGE_NBYTES) -> int:
    """Return the smallest multiple of `unit` that is not below n."""
    return -(-n // unit) * unit


def format_nbytes(n: float) -> str:
    """Return n bytes as text with a binary unit: `20,736 B`, `1.5 MiB`, `63.28 GiB`."""
    if abs(n) < 2**15:
        return f"{n:,.0f} B"
    for unit, name in ((2**40, "TiB"), (GIB, "GiB"), (MIB, "MiB")):
        if abs(n) >= unit:
            return f"{n / unit:,.2f} {name}"
    return f"{n / 1024:,.1f} KiB"


def format_duration(seconds: float) -> str:
    """Return seconds as text: `0.4 s`, `2 min 05 s`, `3 h 12 min`."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, sec = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {sec:02d} s"
