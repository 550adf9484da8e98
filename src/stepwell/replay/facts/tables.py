"""The facts of one kind by name, with a user's own over them."""

import tomllib
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

Positive: TypeAlias = Annotated[float, Meta(gt=0)]
Count: TypeAlias = Annotated[int, Meta(ge=0)]


class FactError(ValueError):
    """A fact that is not known, or an override that cannot be used; the message says which."""


class Fact(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the figures come from."""

    source: str
    date: str
    estimates: tuple[str, ...] = ()  # fields that nobody published: derived, rounded or remembered


class Gpu(Fact, frozen=True, kw_only=True):
    """One GPU."""

    bf16_tflop_per_s: Positive  # dense peak
    memory_gib: Positive
    memory_gb_per_s: Positive
    host_gb_per_s: Positive  # one direction of its link to host memory
    usd_per_hour: Positive


class TierFact(Fact, frozen=True, kw_only=True):
    """One tier of a kind, as far as nothing else is said."""

    read_gb_per_s: Positive
    write_gb_per_s: Positive
    latency_us: Annotated[float, Meta(ge=0)]
    usd_per_gib_month: Annotated[float, Meta(ge=0)]


class Price(Fact, frozen=True, kw_only=True):
    """What an API asks for cached input tokens."""

    input_usd_per_million: Positive
    cache_write_factor: Annotated[float, Meta(ge=0)]
    cache_read_factor: Annotated[float, Meta(ge=0)]
    kept_s: Positive


class Model(Fact, frozen=True, kw_only=True):
    """A model's shape, as far as prices and KV sizes hang on it."""

    layers: Annotated[int, Meta(ge=1)]
    attention: Literal["gqa", "mla"]
    attention_dim: Annotated[int, Meta(ge=1)]  # query heads x the mean of key and value head sizes
    parameters_billion: Positive
    active_billion: Positive  # used for one token
    kv_heads: Count = 0
    kv_head_dim: Count = 0
    latent_dim: Count = 0  # MLA
    window_layers: Count = 0
    window_tokens: Count = 0
    state_layers: Count = 0
    state_bytes: Count = 0  # of each such layer, for a whole sequence
    weight_bytes: Positive = 2.0  # a parameter
    kv_bytes: Positive = 2.0  # a value of a key, a value or a latent


F = TypeVar("F", bound=Fact)

_FILES: dict[type[Fact], str] = {Gpu: "gpus", TierFact: "tiers", Model: "models", Price: "prices"}


def table(kind: type[F], overrides: Path | None = None) -> dict[str, F]:
    """All facts of a kind by name.

    `overrides` is a TOML file with tables such as `[gpus.H100]`, whose fields replace or add to ours; a new
    name needs all fields, and without a `source` it is "the user's". Raises FactError.
    """
    name = _FILES[kind]
    found = tomllib.loads(files(__package__).joinpath(f"{name}.toml").read_text())
    for key, fields in _read(overrides).get(name, {}).items():
        found[key] = {"source": "the user's", "date": "unknown"} | found.get(key, {}) | fields
    try:
        return msgspec.convert(found, dict[str, kind])  # type: ignore[valid-type]
    except msgspec.ValidationError as error:
        raise FactError(f"{overrides}: {name}: {error}") from error


def pick(facts: dict[str, F], name: str, what: str) -> F:
    """One by its name, in any case of letters. Raises FactError naming the nearest."""
    by_lower = {known.lower(): fact for known, fact in facts.items()}
    fact = by_lower.get(name.lower())
    if fact is None:
        close = get_close_matches(name.lower(), by_lower, 1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise FactError(f"no {what} {name!r} is known{hint} (known: {', '.join(facts)})")
    return fact


def _read(overrides: Path | None) -> dict[str, dict[str, dict[str, object]]]:
    if overrides is None:
        return {}
    try:
        given = tomllib.loads(overrides.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise FactError(f"{overrides}: cannot be read: {error}") from error
    for name, facts in given.items():
        if name not in _FILES.values() or not isinstance(facts, dict):
            raise FactError(f"{overrides}: no table {name!r} of facts (known: {', '.join(_FILES.values())})")
        for key, fields in facts.items():
            if not isinstance(fields, dict):
                raise FactError(f"{overrides}: {name}.{key} is not a table of fields")
    return given
