from collections.abc import Iterator

import pytest
from engine_kit import Cache


@pytest.fixture
def cache() -> Iterator[Cache]:
    """Checked at the end: whatever the test did, nothing is kept that nobody holds."""
    cache = Cache()
    yield cache
    cache.close()
