"""Sizes in bytes, as people write them."""

import re
from fractions import Fraction
from types import MappingProxyType

_UNITS = MappingProxyType(
    {
        "B": 1,
        "KiB": 1 << 10,
        "MiB": 1 << 20,
        "GiB": 1 << 30,
        "TiB": 1 << 40,
        "kB": 10**3,
        "MB": 10**6,
        "GB": 10**9,
        "TB": 10**12,
    }
)
_BYTES_BY_LOWER_UNIT = MappingProxyType({"": 1} | {unit.lower(): size for unit, size in _UNITS.items()})
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([a-z]*)", re.ASCII | re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes in `text`: "4GiB", "4GB", "512 MiB", "1.5TiB" or "1048576"; the case of units is ignored.

    Raises ValueError naming the accepted forms, also for "4G", which half of its users take for 2^30.
    """
    match = _SIZE.fullmatch(text.strip())
    unit_bytes = _BYTES_BY_LOWER_UNIT.get(match[2].lower()) if match else None
    size = Fraction(match[1]) * unit_bytes if match and unit_bytes else None
    if size is None or size.denominator != 1:
        raise ValueError(
            f"'{text}' is not a size; write it as 4GiB, 4GB, 512 MiB or a whole number of bytes "
            f"(units: {', '.join(_UNITS)})"
        )
    return int(size)


def format_size(size_bytes: int) -> str:
    """`size_bytes` in the largest unit that loses nothing; `parse_size` reads it back."""
    fitting = [(size, unit) for unit, size in _UNITS.items() if size_bytes % size == 0 and size <= size_bytes]
    size, unit = max(fitting, default=(1, "B"))
    return f"{size_bytes // size}{unit}"


def parse_rate(text: str) -> int:
    """Bytes a second in `text`: a size, then "/s", as in 500MB/s. Raises ValueError for all else and 0."""
    size, slash, second = text.strip().rpartition("/")
    if not slash or second.strip() != "s" or (bytes_per_s := parse_size(size)) == 0:
        raise ValueError(f"'{text}' is not a rate; write it as 500MB/s or 2GiB/s")
    return bytes_per_s


def format_rate(bytes_per_s: int) -> str:
    """`parse_rate` reads it back."""
    return f"{format_size(bytes_per_s)}/s"


_SECONDS_BY_UNIT = MappingProxyType({"us": 1e-6, "ms": 1e-3, "s": 1.0})
_DURATION = re.compile(r"(\d+(?:\.\d+)?) ?(us|ms|s)", re.ASCII)


def parse_duration(text: str) -> float:
    """Seconds in `text`: "50ms", "1.5s" or "200us". Raises ValueError for anything else."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"'{text}' is not a duration; write it as 50ms, 1.5s or 200us")
    return float(match[1]) * _SECONDS_BY_UNIT[match[2]]


def format_duration(seconds: float) -> str:
    """`parse_duration` reads it back."""
    return f"{seconds * 1e3:g}ms" if 0 < seconds < 1 else f"{seconds:g}s"
