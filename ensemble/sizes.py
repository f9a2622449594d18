"""Sizes, counts and times as people read them."""


def gib(size: float) -> str:
    """Bytes in GiB, or in MiB where they are less than half a GiB."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**29 else f"{size / 2**20:,.1f} MiB"


def plural(count: int, noun: str) -> str:
    """``1 row``, ``1,200 rows``; the noun takes an s, and a batch or a match an es."""
    ending = "" if count == 1 else "es" if noun.endswith("ch") else "s"
    return f"{count:,} {noun}{ending}"


def duration(seconds: float) -> str:
    """8.2 s, 1:05 min, 2:03:10 h."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d} h" if hours else f"{minutes}:{rest:02d} min"
