"""The chain of keys: golden vectors, and what must hold for any prompt."""

import subprocess
import sys
import time
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell.keys import chunk_keys

PROMPT = [0, 1, 2, 3, 50_000, 2**31, 2**32 - 1, 7, 7]
# Made once by this code and checked in: another version of it must find what this one stored.
GOLDEN: list[tuple[str | bytes | None, int, list[str]]] = [
    (
        None,
        4,
        [
            "a2d8709381aead6e68f7afd61c290dfa60945f3f984860c02a08ad2dc90b28d1",
            "73bfd321e35366bb52c3639f41ce32a6cfd448ecbd00e3f545549ecefcdf0311",
        ],
    ),
    (
        None,
        1,
        [
            "3179496070a34672bbb13e9bf64b4cbb7467db4bb6785eae9eee896d37965aec",
            "407df6be5602f9018b9c37f299644675aabf1be212c97c7ca6b89b83720a74a3",
            "4d6eaa1c25d84650f0db57d9c5fa9d754629f7e90242f820c309db522f959be8",
            "c77042f1943215fedaaee16ddcfbafa1bbf55b948792ae35e71b7eb7a86816e7",
            "16551b77f01200b8140b2112160100ce65bf61143a7e44f34c8c32f223abf2eb",
            "989b3e7a7f98b80a15f14cd1669e45709c35fb9919922fc524508da69027755a",
            "066d73467d3300cae122038291e4b3a55f749a73c2b609d06f3f62c99e422e9e",
            "00009eef2b17a082f4759f8d68642b4778b72a251e36511103cc72899ec41aaa",
            "9562446e86d36380621d902872d982463ac868d0906655d82e3659dc9f4badb7",
        ],
    ),
    (None, 10, []),
    (
        "",
        4,
        [
            "1b145c77d3c34dadd8aa5454297bd6f3c4fd4a0286e6359d9ef3e9c3d15a5087",
            "f746b4275b164dc188fec61365c8d43cde83477037c05ea221bf031b9899c3ed",
        ],
    ),
    (
        "None",
        4,
        [
            "fdb9a841ca9ffaf632cd80ddcbb0dd67b6a558921446708a1c1aecc233095e5d",
            "6c0a2324aa6b234a29963f4eba4a8ba8de2fa4c1a25ec9f1a4dd66726495abcc",
        ],
    ),
    (
        b"",
        4,
        [
            "d95706d8d5e6c746eebbce7a13454e6cb91616e41a0fa18df7c3bac05d26e45b",
            "059a9dfd0c9841e17c6b5b67d0f85fd0cfa94ac0bcd3c96fdeed6b12abba3ea5",
        ],
    ),
    (
        "Zürich 🔑",
        4,
        [
            "e0a82c2e78bd1232fe3ef9d8cc8bb6d041c6f6e04103a853bfee522158b7b30c",
            "8a69557e6da5b394dde0c91c4469e1a8b1da9500a07d54f72cfaf640c9922169",
        ],
    ),
    ("tenant", 8, ["8ab21913a7d4dfcc268d4e4ca00b17a29575711d35cabe31e92224ce4b472d18"]),
]
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)
SALTS = st.none() | st.text(max_size=5) | st.binary(max_size=5)


@pytest.mark.parametrize(("salt", "chunk_tokens", "keys"), GOLDEN)
def test_golden_vectors(salt: str | bytes | None, chunk_tokens: int, keys: list[str]) -> None:
    assert [key.hex() for key in chunk_keys(PROMPT, chunk_tokens, salt)] == keys


@given(TOKENS, st.integers(1, 9), SALTS)
def test_one_key_a_whole_chunk(tokens: list[int], chunk_tokens: int, salt: str | bytes | None) -> None:
    keys = chunk_keys(tokens, chunk_tokens, salt)
    assert len(keys) == len(tokens) // chunk_tokens
    assert len(set(keys)) == len(keys)
    assert all(type(key) is bytes and len(key) == 32 for key in keys)


@given(TOKENS, TOKENS, TOKENS, st.integers(1, 5))
def test_prompts_share_keys_up_to_the_first_chunk_that_differs(
    shared: list[int], one: list[int], other: list[int], chunk_tokens: int
) -> None:
    prompts = shared + one, shared + other
    same = next((n for n, (a, b) in enumerate(zip(*prompts, strict=False)) if a != b), min(map(len, prompts)))
    keys = [chunk_keys(prompt, chunk_tokens) for prompt in prompts]
    common = min(same // chunk_tokens, *map(len, keys))
    assert keys[0][:common] == keys[1][:common]
    assert not set(keys[0][common:]) & set(keys[1][common:]), "nothing meets again after a difference"


@given(st.lists(st.integers(0, 2**32 - 1), min_size=4, max_size=40), SALTS, SALTS)
def test_salts_never_meet(tokens: list[int], one: str | bytes | None, other: str | bytes | None) -> None:
    keys, others = chunk_keys(tokens, 4, one), chunk_keys(tokens, 4, other)
    if type(one) is type(other) and one == other:
        assert keys == others
    else:
        assert not set(keys) & set(others)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=12, max_size=40))
def test_chunks_of_two_sizes_never_meet(tokens: list[int]) -> None:
    assert not set(chunk_keys(tokens, 3)) & set(chunk_keys(tokens, 4))


@pytest.mark.parametrize("bad", [-1, 2**32, 1.5, None, "1", b"1", [1]])
def test_what_is_no_token_id_is_refused(bad: object) -> None:
    with pytest.raises(ValueError, match=r"token ids must be integers from 0 to 2\^32-1"):
        chunk_keys([1, 2, bad, 4], 2)  # type: ignore[list-item]


@pytest.mark.parametrize("chunk_tokens", [0, -1])
def test_a_chunk_without_tokens_is_refused(chunk_tokens: int) -> None:
    with pytest.raises(ValueError, match="chunk_tokens must be at least 1"):
        chunk_keys([1, 2], chunk_tokens)


def test_only_the_ids_count_not_what_they_lie_in() -> None:
    ids = [1, 0, 0, 0, 9, 0, 0, 255]
    expected = chunk_keys(ids, 2)
    kinds = (tuple(ids), array("I", ids), array("q", ids), bytes(ids), bytearray(ids), memoryview(bytes(ids)))
    assert [chunk_keys(kind, 2) for kind in kinds] == [expected] * len(kinds)


def test_two_processes_agree_whatever_their_hash_seed() -> None:
    program = (
        "from stepwell.keys import chunk_keys; "
        "print([k.hex() for s in (None, '', 'x', b'x') for k in chunk_keys(range(100), 16, s)])"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "random")
    }
    here = [k.hex() for s in (None, "", "x", b"x") for k in chunk_keys(range(100), 16, s)]
    assert len(here) == 24
    assert printed == {f"{here}\n".encode()}


def test_a_million_tokens_in_less_than_a_second() -> None:
    tokens = list(range(1_000_000))
    start_s = time.perf_counter()
    keys = chunk_keys(tokens, 16)
    assert time.perf_counter() - start_s < 1.0
    assert len(keys) == 62_500
