"""Sizes as people read them."""


def gib(size: float) -> str:
    """Bytes in GiB, or in MiB where they are less than half a GiB."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**29 else f"{size / 2**20:,.1f} MiB"
