import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell.sizes import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("4GiB", 4 << 30),
        ("4GB", 4 * 10**9),
        ("512 MiB", 512 << 20),
        ("1.5TiB", 3 << 39),
        ("64gib", 64 << 30),
        ("1048576", 1 << 20),
        ("7B", 7),
        (" 0 ", 0),
    ],
)
def test_accepted_forms(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    "text",
    ["", "4G", "4 gigs", "-1", "1e9", "1.5", "0.3KiB", "GiB", "4  GiB", "nan", "inf", "٤GiB", "4GiB\n5"],
)
def test_anything_else_is_refused_with_the_accepted_forms(text: str) -> None:
    with pytest.raises(ValueError, match="4GiB, 4GB, 512 MiB or a whole number of bytes"):
        parse_size(text)


@given(st.integers(min_value=0, max_value=1 << 60))
def test_a_written_size_reads_back(size_bytes: int) -> None:
    assert parse_size(format_size(size_bytes)) == size_bytes


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(4 << 30, "4GiB"), (1536 << 20, "1536MiB"), (6 * 10**9, "6GB"), (1023, "1023B"), (0, "0B")],
)
def test_the_largest_unit_that_loses_nothing(size_bytes: int, text: str) -> None:
    assert format_size(size_bytes) == text
