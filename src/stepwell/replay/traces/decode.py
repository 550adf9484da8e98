"""One JSON line of a trace into a struct, and what is wrong with it in words."""

import math
from typing import Annotated, TypeAlias, TypeVar

import msgspec

from stepwell.replay.traces.record import BadRecord

T = TypeVar("T")

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
HashId: TypeAlias = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0)]


def decode(decoder: msgspec.json.Decoder[T], number: int, line: bytes) -> T:
    """Raises BadRecord with what is wrong and in which field."""
    try:
        return decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRecord(number, f"{error}{_hint(line)}") from error


def finite(number: int, name: str, value: float) -> float:
    """The value. Raises BadRecord where it is infinite (as 1e999 is) or not a number."""
    if not math.isfinite(value):
        raise BadRecord(number, f"{name} is {value}, not a time")
    return value


def _hint(line: bytes) -> str:
    for constant in (b"NaN", b"Infinity"):
        if constant in line:
            return f" ({constant.decode()} is not a JSON number)"
    return ""
