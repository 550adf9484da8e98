"""A header is believed whole or not at all."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell.codec import frame
from stepwell.codec.frame import HEADER_BYTES, Header, Kind
from support.chunks import chunk_id

HEADERS = st.builds(
    Header,
    chunk=st.binary(min_size=48, max_size=48),
    sequence=st.integers(0, 2**64 - 1),
    payload_bytes=st.integers(0, 2**64 - 1),
    payload_digest=st.binary(min_size=16, max_size=16),
    kind=st.sampled_from(Kind),
    codec=st.integers(0, 2**32 - 1),
)
HEADER = Header(chunk_id(1), 7, 4096, frame.digest(b"x"))


@given(HEADERS)
def test_what_is_packed_comes_back(header: Header) -> None:
    packed = frame.pack(header)
    assert len(packed) == HEADER_BYTES
    assert frame.unpack(packed + b"what follows") == header


def test_the_form_on_disk_does_not_change_by_accident() -> None:
    packed = frame.pack(Header(bytes(range(48)), 1, 2, bytes(16), Kind.CLEAR_SPACE, 3))
    assert packed[:16].hex() == "5354455057454c4c0100010003000000"
    assert packed[16:64] == bytes(range(48))
    assert packed[64:96].hex() == "01" + 7 * "00" + "02" + 7 * "00" + 16 * "00"
    assert packed[112:].hex() == frame.digest(packed[:96]).hex()


@pytest.mark.parametrize("bit", range(HEADER_BYTES * 8))
def test_one_flipped_bit_and_it_is_no_header(bit: int) -> None:
    packed = bytearray(frame.pack(HEADER))
    packed[bit // 8] ^= 1 << bit % 8
    assert frame.unpack(packed) is None


@pytest.mark.parametrize("nbytes", [0, 1, HEADER_BYTES - 1])
def test_a_part_of_one_is_none(nbytes: int) -> None:
    assert frame.unpack(frame.pack(HEADER)[:nbytes]) is None


@given(st.binary(max_size=300))
def test_garbage_is_none(data: bytes) -> None:
    assert frame.unpack(data) is None


def test_the_digest_is_xxh3_128() -> None:
    assert frame.digest(b"").hex() == "99aa06d3014798d86001c324468d497f"  # of the empty input, as published
