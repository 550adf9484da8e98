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
