"""One typed configuration: defaults, then a TOML file, then the environment, then flags.

An option is declared once, on its field of `Config`; the file's names, the STEPWELL_ variables, the flags
of the command line and their help all follow from that.
"""

import difflib
import os
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, cast, get_args, get_type_hints

import msgspec

from stepwell.sizes import format_duration, format_rate, format_size, parse_duration, parse_rate, parse_size

Environ: TypeAlias = Mapping[str, str]
Eviction: TypeAlias = Literal["lru", "s3fifo", "fifo"]
LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]

ENV_PREFIX = "STEPWELL_"
CONFIG_FILE_ENV = "STEPWELL_CONFIG"
# Read by other parts of Stepwell, so not misspelt options.
OTHER_ENV = (CONFIG_FILE_ENV, "STEPWELL_TRACES", "STEPWELL_MODEL_DIR")
TEST_ENV_PREFIX = "STEPWELL_TEST_"

# sun_path of a unix socket's address holds 108 bytes with the closing NUL (unix(7)).
SOCKET_PATH_BYTES_MAX = 107


class ConfigError(ValueError):
    """The configuration cannot be used; the message says what is wrong, where, and what to write."""


class Option(msgspec.Struct, frozen=True):
    """How people write one option, and how to choose it."""

    name: str  # in the file; "log_level" is STEPWELL_LOG_LEVEL and --log-level elsewhere
    default: str | Callable[[Environ], str]  # as a user would write it
    parse: Callable[[str], Any]  # raises ValueError that says what to write instead
    show: Callable[[Any], str]  # the inverse of parse
    help: str  # the unit, and how to choose

    @property
    def env(self) -> str:
        """Its environment variable."""
        return ENV_PREFIX + self.name.upper()

    @property
    def flag(self) -> str:
        """Its flag on the command line."""
        return "--" + self.name.replace("_", "-")

    def default_text(self, environ: Environ) -> str:
        """Its value where nobody set it."""
        return self.default if isinstance(self.default, str) else self.default(environ)


class HttpAddress(msgspec.Struct, frozen=True):
    """Where to listen for HTTP; port 0 takes any free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def default_socket(environ: Environ, run_user: Path = Path("/run/user")) -> str:
    """`stepwell.sock` in the user's runtime folder, or in a folder of the user's own under /tmp.

    A runtime folder of somebody else (as `su` and `sudo -E` leave behind in XDG_RUNTIME_DIR) is passed over.
    """
    uid = os.getuid()
    for folder in (Path(environ.get("XDG_RUNTIME_DIR", "")), run_user / str(uid)):
        if folder.is_absolute() and folder.is_dir() and folder.stat().st_uid == uid:
            return str(folder / "stepwell.sock")
    return f"/tmp/stepwell-{uid}/stepwell.sock"


def _parse_memory(text: str) -> int:
    memory_bytes = parse_size(text)
    if memory_bytes == 0:
        raise ValueError("must be more than 0 bytes; to run without a cache, do not start it")
    return memory_bytes


def _parse_disk(text: str) -> Path | None:
    if text == "off":
        return None
    if not text or "\0" in text:
        raise ValueError("is empty or holds a NUL; write the path of a folder, or off")
    return Path(text).expanduser().absolute()


def _show_or_off(value: object) -> str:
    return "off" if value is None else str(value)


def _parse_limit(text: str) -> int | None:
    return None if text == "off" else parse_rate(text)


def _show_limit(bytes_per_s: int | None) -> str:
    return "off" if bytes_per_s is None else format_rate(bytes_per_s)


def _parse_socket(text: str) -> Path:
    if not text or "\0" in text:
        raise ValueError("is empty or holds a NUL; write the path of a unix socket")
    path = Path(text).expanduser().absolute()
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
        raise ValueError(f"'{path}' is longer than the {SOCKET_PATH_BYTES_MAX} bytes of a unix socket's path")
    return path


def _parse_http(text: str) -> HttpAddress | None:
    if text == "off":
        return None
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") if host.startswith("[") else host
    if not host or not (port.isascii() and port.isdecimal()) or int(port) > 65535:
        raise ValueError(f"'{text}' is not an address; write HOST:PORT, as in 127.0.0.1:7311, or off")
    return HttpAddress(host, int(port))


def _one_of(words: Iterable[str]) -> Callable[[str], str]:
    allowed = tuple(words)

    def parse(text: str) -> str:
        if text not in allowed:
            raise ValueError(f"'{text}' is not one of {', '.join(allowed)}{_nearest(text, allowed)}")
        return text

    return parse


class Config(msgspec.Struct, frozen=True):
    """What the cache server runs with. Each field's `Option` says how to write and choose it."""

    memory_bytes: Annotated[
        int,
        Option(
            name="memory",
            default="4GiB",
            parse=_parse_memory,
            show=format_size,
            help=(
                "Host memory for cached chunks, in bytes: 4GiB, 4GB, 512 MiB or a whole number. One limit "
                "for the whole server, whatever the number of engines. Choose what the node can spare "
                "beside its engines: an 8B model needs about 128 KiB a token (32,768 tokens in 4GiB)."
            ),
        ),
    ]
    disk: Annotated[
        Path | None,
        Option(
            name="disk",
            default="off",
            parse=_parse_disk,
            show=_show_or_off,
            help=(
                "Folder for chunks on a local drive, or off. They outlive the server and their place in "
                "memory. Choose a folder on an NVMe drive; it is made if need be, and one server uses it."
            ),
        ),
    ]
    disk_bytes: Annotated[
        int,
        Option(
            name="disk_size",
            default="64GiB",
            parse=_parse_memory,
            show=format_size,
            help=(
                "Most bytes that the folder ever takes, all files together. Ten times the memory is a good "
                "beginning; stepwell stats shows what is evicted for want of room."
            ),
        ),
    ]
    disk_read_bytes_per_s: Annotated[
        int | None,
        Option(
            name="disk_read_limit",
            default="off",
            parse=_parse_limit,
            show=_show_limit,
            help="Most bytes a second to read from the drive, as 500MB/s, where others use it too; or off.",
        ),
    ]
    disk_write_bytes_per_s: Annotated[
        int | None,
        Option(
            name="disk_write_limit",
            default="off",
            parse=_parse_limit,
            show=_show_limit,
            help=(
                "Most bytes a second to write to the drive, as 200MB/s, where others use it or it wears out; "
                "or off. What comes faster is not written."
            ),
        ),
    ]
    disk_read_latency_s: Annotated[
        float,
        Option(
            name="disk_read_latency",
            default="0s",
            parse=parse_duration,
            show=format_duration,
            help="For trials: least time of one read, as 50ms. Leave it at 0s to serve.",
        ),
    ]
    socket: Annotated[
        Path,
        Option(
            name="socket",
            default=default_socket,
            parse=_parse_socket,
            show=str,
            help=(
                "Path of the unix socket where this user's engines find the server. Set it to run two "
                "servers on one node; otherwise the default in the user's runtime folder will do."
            ),
        ),
    ]
    http: Annotated[
        HttpAddress | None,
        Option(
            name="http",
            default="127.0.0.1:7311",
            parse=_parse_http,
            show=_show_or_off,
            help=(
                "HOST:PORT for /metrics, /healthz and /stats, or off; port 0 takes any free one. Anybody who "
                "reaches it can read it: leave the loopback address only for a network that you trust."
            ),
        ),
    ]
    eviction: Annotated[
        Eviction,
        Option(
            name="eviction",
            default="lru",
            parse=_one_of(get_args(Eviction)),
            show=str,
            help=(
                "What goes first when memory is full: lru (least recently used) suits chats, s3fifo keeps "
                "prompts that come back when many never do, fifo (oldest first) is there to compare with."
            ),
        ),
    ]
    log_level: Annotated[
        LogLevel,
        Option(
            name="log_level",
            default="info",
            parse=_one_of(get_args(LogLevel)),
            show=str,
            help="Least level of messages written to stderr: debug, info, warning or error.",
        ),
    ]


def _declared_options() -> dict[str, Option]:
    hints = get_type_hints(Config, include_extras=True)
    return {field: cast(Option, get_args(hint)[1]) for field, hint in hints.items()}


OPTIONS: Mapping[str, Option] = _declared_options()
"""The option of each field of `Config`, in its order."""


class Setting(msgspec.Struct, frozen=True):
    """One option's value, and who set it."""

    name: str
    value: str  # as a user would write it
    source: str  # "default", the file's path, "STEPWELL_MEMORY" or "--memory"


class Effective(msgspec.Struct, frozen=True):
    """The configuration in force, and where each value came from."""

    config: Config
    settings: tuple[Setting, ...]


class _Given(msgspec.Struct, frozen=True):
    """What somebody wrote for an option."""

    text: str
    source: str


def resolve(flags: Mapping[str, str | None], environ: Environ, file: Path | None = None) -> Effective:
    """The configuration from `flags` over `environ` over `file` (else the one STEPWELL_CONFIG names).

    `flags` maps options' names to what was typed, None for a flag not given.
    Raises ConfigError for a value or name that is not known and a file that cannot be read.
    """
    if file is None and CONFIG_FILE_ENV in environ:
        file = Path(environ[CONFIG_FILE_ENV])
    given = _from_file(file) if file is not None else {}
    given |= _from_environ(environ)
    given |= _from_flags(flags)

    values: dict[str, Any] = {}
    settings = []
    for field, option in OPTIONS.items():
        written = given.get(option.name) or _Given(option.default_text(environ), "default")
        try:
            values[field] = option.parse(written.text)
        except ValueError as error:
            where = f"{option.name} in {written.source}" if written.source == str(file) else written.source
            raise ConfigError(f"{where}: {error}") from error
        settings.append(Setting(option.name, option.show(values[field]), written.source))
    return Effective(Config(**values), tuple(settings))


def to_flags(config: Config) -> list[str]:
    """The flags that give exactly `config`, whatever the environment."""
    return [f"{option.flag}={option.show(getattr(config, field))}" for field, option in OPTIONS.items()]


def _from_file(path: Path) -> dict[str, _Given]:
    try:
        with path.open("rb") as file:
            table = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the configuration file {path} is not valid TOML: {error}") from error
    names = [option.name for option in OPTIONS.values()]
    given = {}
    for name, value in table.items():
        if name not in names:
            raise ConfigError(f"{path}: there is no option '{name}'{_nearest(name, names)}")
        # bool is an int to Python, but `memory = true` means nothing.
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise ConfigError(f"{name} in {path}: write text in quotes or a whole number")
        given[name] = _Given(str(value), str(path))
    return given


def _from_environ(environ: Environ) -> dict[str, _Given]:
    name_by_env = {option.env: option.name for option in OPTIONS.values()}
    given = {}
    for variable, text in environ.items():
        if (
            not variable.startswith(ENV_PREFIX)
            or variable.startswith(TEST_ENV_PREFIX)
            or variable in OTHER_ENV
        ):
            continue
        if variable not in name_by_env:
            raise ConfigError(
                f"{variable}: there is no such variable{_nearest(variable, [*name_by_env, *OTHER_ENV])}"
            )
        given[name_by_env[variable]] = _Given(text, variable)
    return given


def _from_flags(flags: Mapping[str, str | None]) -> dict[str, _Given]:
    by_name = {option.name: option for option in OPTIONS.values()}
    given = {}
    for name, text in flags.items():
        if name not in by_name:
            raise ConfigError(f"there is no option '{name}'{_nearest(name, by_name)}")
        if text is not None:
            given[name] = _Given(text, by_name[name].flag)
    return given


def _nearest(word: str, known: Iterable[str]) -> str:
    """How to go on after "there is no …": the nearest known word, else all of them."""
    words = list(known)
    near = difflib.get_close_matches(word, words, n=1)
    return f"; did you mean {near[0]}?" if near else f"; known are {', '.join(words)}"
