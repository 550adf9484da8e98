"""How far two computations of the same attention state are apart."""

import numpy as np
import numpy.typing as npt

from stepwell.engines.pages import Bytes

_FLOATS: dict[str, npt.DTypeLike] = {"float16": np.float16, "float32": np.float32, "float64": np.float64}


def difference(stored: Bytes, fresh: Bytes, element: str) -> float:
    """Norm of the difference by the norm of `stored`, for elements of this type; 0 for equal bytes.

    Infinite for bytes that differ where `element` is no floating type that numpy knows: such caches are
    compared exactly. How the elements are ordered does not matter, as long as it is the same for both.
    """
    if np.array_equal(stored, fresh):
        return 0.0
    ours, theirs = _numbers(stored, element), _numbers(fresh, element)
    if ours is None or theirs is None:
        return float("inf")
    norm = float(np.linalg.norm(ours))
    distance = float(np.linalg.norm(ours - theirs))
    return distance / norm if norm > 0 and np.isfinite(distance) else float("inf")


def _numbers(data: Bytes, element: str) -> npt.NDArray[np.float64] | None:
    if element == "bfloat16":  # the upper half of a float32
        upper = np.ascontiguousarray(data).view(np.uint16).astype(np.uint32) << 16
        return upper.view(np.float32).astype(np.float64)
    if element in _FLOATS:
        return np.ascontiguousarray(data).view(_FLOATS[element]).astype(np.float64)
    return None
