"""Different descriptions never have equal encodings; every field of a space counts."""

import unicodedata
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell.layout import EngineSpace, Field, chunk_blocks, encode, fingerprint, space_id
from stepwell.types import SpaceSpec

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=4)
    | st.binary(max_size=4)
)
FIELDS = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=8,
)
NFC, NFD = unicodedata.normalize("NFC", "é"), unicodedata.normalize("NFD", "é")
DISTINCT: list[Field] = [
    None, "None", "", b"", 0, False, "0", b"0", 0.0, -0.0, 1, True, "1", "True", 1.0, -1,
    [], {}, [None], [[]], [""], ["a", "bc"], ["ab", "c"], ["abc"], "abc", b"abc", [b"abc"], ["a", ["bc"]],
    {"a": "bc"}, {"ab": "c"}, {"a": None}, {"a": ""}, {"": "a"}, {"a": 1, "b": 2}, {"a": 2, "b": 1},
    [["a", 1], ["b", 2]], {"a": {"b": 1}}, {"a": [1, 2]}, {"a": [2, 1]},
    NFC, NFD, "\0", "a\0", "\0a", "/", "?", "..", "../x", "%", "%2F", "a/b", "A", "a", "x" * 300, "x" * 301,
    "s" + "\x01" + "\0" * 7 + "a", "\ud800", "\ufffd", 2**64, -(2**64), float("inf"), float("-inf"),
]  # fmt: skip


def exact(value: Any) -> Any:
    """`value` with its types, for Python's own 1 == True == 1.0 and 0.0 == -0.0."""
    match value:
        case list():
            return ("list", tuple(exact(item) for item in value))
        case dict():
            return ("dict", frozenset((name, exact(item)) for name, item in value.items()))
        case _:
            return (type(value).__name__, repr(value))


def test_values_that_have_been_mixed_up_have_encodings_of_their_own() -> None:
    assert NFC != NFD
    assert len({encode(value) for value in DISTINCT}) == len(DISTINCT)
    assert len({fingerprint(value) for value in DISTINCT}) == len(DISTINCT)
    assert {len(fingerprint(value)) for value in DISTINCT} == {32}


@given(FIELDS, FIELDS)
def test_encodings_are_equal_only_for_equal_values(one: Any, other: Any) -> None:
    assert (encode(one) == encode(other)) == (exact(one) == exact(other))


@given(st.lists(st.text(max_size=3), max_size=4), st.lists(st.text(max_size=3), max_size=4))
def test_texts_side_by_side_do_not_flow_together(one: list[str], other: list[str]) -> None:
    assert (encode(one) == encode(other)) == (one == other)
    assert (encode([*one, other]) == encode([*one, *other])) is False


@given(st.dictionaries(st.text(max_size=3), SCALARS, max_size=5), st.randoms())
def test_the_order_of_a_mappings_names_does_not_count(fields: dict[str, Field], random: Any) -> None:
    names = list(fields)
    random.shuffle(names)
    assert encode({name: fields[name] for name in names}) == encode(fields)


def test_a_list_and_a_tuple_are_the_same_sequence() -> None:
    assert encode([1, ("a", [None])]) == encode((1, ["a", (None,)]))


@pytest.mark.parametrize("value", [object(), {1, 2}, 1j, [{"a": object()}]])
def test_other_types_are_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="cannot be part of a fingerprint"):
        encode(value)


SPACE = EngineSpace(
    engine="vllm",
    engine_version="0.32.0",
    model_config='{"rope_theta":10000}',
    weights=b"w" * 32,
    adapter=None,
    kv_dtype="bfloat16",
    block_tokens=16,
    chunk_blocks=4,
    worker_layouts=(b"l" * 32, b"m" * 32),
    key_seed=b"s" * 32,
    key_algorithm="sha256",
    tensor_parallel=2,
    pipeline_parallel=1,
    salt=None,
)
OTHERS: dict[str, list[Any]] = {
    "engine": ["sglang", "VLLM", ""],
    "engine_version": ["0.32.1"],
    "model_config": ['{"rope_theta":20000}', '{"rope_theta": 10000}'],
    "weights": [b"x" * 32, b""],
    "adapter": [b"", b"a" * 32, b"None"],
    "kv_dtype": ["float16", "fp8_e4m3", "fp8_e5m2", "int8"],
    "block_tokens": [32],
    "chunk_blocks": [2],
    "worker_layouts": [(b"m" * 32, b"l" * 32), (b"l" * 32,), (b"l" * 32 + b"m" * 32,), ()],
    "key_seed": [b"t" * 32],
    "key_algorithm": ["sha256_cbor"],
    "tensor_parallel": [1],
    "pipeline_parallel": [2],
    "salt": ["", "None", "tenant"],
    "generation": [b"1", b"2"],
}


def test_every_field_of_an_engines_space_counts() -> None:
    assert set(OTHERS) == set(EngineSpace.__struct_fields__)
    spaces = [
        msgspec.structs.replace(SPACE, **{name: value}) for name, values in OTHERS.items() for value in values
    ]
    assert len({space.fingerprint() for space in [SPACE, *spaces]}) == 1 + len(spaces)
    assert msgspec.structs.replace(SPACE).fingerprint() == SPACE.fingerprint(), "and back again"


def test_an_adapter_and_a_salt_of_one_name_are_two_things() -> None:
    adapter, salt = (msgspec.structs.replace(SPACE, **field) for field in ({"adapter": b"X"}, {"salt": "X"}))
    assert adapter.fingerprint() != salt.fingerprint()


def test_spaces_differ_by_fingerprint_and_by_both_sizes() -> None:
    specs = [
        SpaceSpec(b"f" * 32, 16, 4096),
        SpaceSpec(b"g" * 32, 16, 4096),
        SpaceSpec(b"f" * 32, 4096, 16),
        SpaceSpec(b"f" * 32, 16, 8192),
        SpaceSpec(b"f" * 32, 32, 4096),
    ]
    assert len({space_id(spec) for spec in specs}) == len(specs)
    assert {len(space_id(spec)) for spec in specs} == {16}
    assert space_id(SpaceSpec(b"f" * 32, 16, 4096)) == space_id(specs[0])


def test_golden_fingerprints() -> None:
    """Checked in: another version must find what this one stored on a slower tier."""
    assert (
        fingerprint(["a", 1, True, None, b"b", 0.5, {"c": "d"}]).hex()
        == "a1f8bb07a4b9434410e0c453b5d320aebedae78318c9e91e1f884cf2c364262c"
    )
    assert SPACE.fingerprint().hex() == "20cf137845a817c323beff3a8d29e4a68686b2b9d3beddd84fd44220608fbee7"
    assert space_id(SpaceSpec(b"f" * 32, 16, 4096)).hex() == "795135861e7dfbd4ae1fb2d0a4056c88"


@pytest.mark.parametrize(
    ("block_bytes", "blocks"),
    [
        (1, 1 << 20),
        (1000, 1049),
        (1 << 19, 2),
        ((1 << 20) - 1, 2),
        (1 << 20, 1),
        ((1 << 20) + 1, 1),
        (5 << 20, 1),
    ],
)
def test_a_chunk_is_the_fewest_blocks_that_reach_a_mebibyte(block_bytes: int, blocks: int) -> None:
    assert chunk_blocks(block_bytes) == blocks
