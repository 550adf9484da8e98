import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell.config import (
    OPTIONS,
    Config,
    ConfigError,
    HttpAddress,
    default_socket,
    resolve,
    to_flags,
)

ENVIRON = {"XDG_RUNTIME_DIR": "/nonexistent"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "stepwell.toml"


NAMES = [
    "memory", "disk", "disk_size", "disk_read_limit", "disk_write_limit", "disk_read_latency", "socket",
    "http", "eviction", "log_level",
]  # fmt: skip


def test_defaults() -> None:
    effective = resolve({}, ENVIRON)
    assert effective.config.memory_bytes == 4 << 30
    assert effective.config.http == HttpAddress("127.0.0.1", 7311)
    assert effective.config.eviction == "lru"
    assert {each.source for each in effective.settings} == {"default"}
    assert [each.name for each in effective.settings] == NAMES


def test_each_source_wins_over_the_one_before(file: Path) -> None:
    file.write_text("memory = '1GiB'\nhttp = 'off'\neviction = 'fifo'\n")
    environ = {**ENVIRON, "STEPWELL_MEMORY": "2GiB", "STEPWELL_HTTP": "[::1]:80"}
    effective = resolve({"memory": "3GiB", "socket": None}, environ, file)
    by_name = {each.name: (each.value, each.source) for each in effective.settings}
    assert by_name["memory"] == ("3GiB", "--memory")
    assert by_name["http"] == ("[::1]:80", "STEPWELL_HTTP")
    assert by_name["eviction"] == ("fifo", str(file))
    assert by_name["log_level"] == ("info", "default")
    assert effective.config.memory_bytes == 3 << 30
    assert effective.config.http == HttpAddress("::1", 80)
    assert effective.config.eviction == "fifo"


def test_the_flag_for_the_file_wins_over_the_variable(file: Path, tmp_path: Path) -> None:
    file.write_text("memory = 1048576")
    environ = {**ENVIRON, "STEPWELL_CONFIG": str(file)}
    assert resolve({}, environ).config.memory_bytes == 1 << 20
    other = tmp_path / "other.toml"
    other.write_text("memory = '2MiB'")
    assert resolve({}, environ, other).config.memory_bytes == 2 << 20


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("memroy = '1GiB'", "there is no option 'memroy'; did you mean memory?"),
        ("zzz = 1", "there is no option 'zzz'; known are " + ", ".join(NAMES)),
        ("[serve]\nmemory = '1GiB'", "there is no option 'serve'"),
        ("memory = true", "memory in .*: write text in quotes or a whole number"),
        ("memory = 1.5", "memory in .*: write text in quotes or a whole number"),
        ("memory = '4 gigs'", "memory in .*: '4 gigs' is not a size; write it as 4GiB"),
        ("memory = 0", "more than 0"),
        ("memory = ", "is not valid TOML"),
        ("memory = '1GiB'\nmemory = '2GiB'", "is not valid TOML"),
    ],
)
def test_a_wrong_file_is_refused(file: Path, text: str, message: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        resolve({}, ENVIRON, file)
    assert str(file) in str(caught.value)


def test_a_file_that_cannot_be_read_is_refused(file: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the configuration file .*: No such file"):
        resolve({}, ENVIRON, file)
    with pytest.raises(ConfigError, match=r"cannot read the configuration file .*: Is a directory"):
        resolve({}, {**ENVIRON, "STEPWELL_CONFIG": str(tmp_path)})
    file.write_bytes(b"memory = '\xff'")
    with pytest.raises(ConfigError, match="is not valid TOML"):
        resolve({}, ENVIRON, file)


def test_unknown_variables_are_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"STEPWELL_MEMROY: .*did you mean STEPWELL_MEMORY\?"):
        resolve({}, {**ENVIRON, "STEPWELL_MEMROY": "1GiB"})
    others = {"STEPWELL_TRACES": "/t", "STEPWELL_TEST_SEED": "1", "STEPWELL_MODEL_DIR": "/m"}
    assert resolve({}, {**ENVIRON, **others}) == resolve({}, ENVIRON)


def test_unknown_flags_are_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'memori'; did you mean memory\?"):
        resolve({"memori": "1GiB"}, ENVIRON)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("memory", "", "'' is not a size"),
        ("http", "7311", "write HOST:PORT"),
        ("http", ":7311", "write HOST:PORT"),
        ("http", "localhost:65536", "write HOST:PORT"),
        ("http", "localhost:-1", "write HOST:PORT"),
        ("eviction", "lfu", "not one of lru, s3fifo, fifo"),
        ("eviction", "LRU", "not one of lru"),
        ("log_level", "warn", "did you mean warning?"),
        ("socket", "", "is empty"),
        ("socket", "a\0b", "NUL"),
        ("socket", "/" + "s" * 107, "longer than the 107 bytes"),
    ],
)
def test_a_wrong_value_names_its_source_and_what_to_write(name: str, text: str, message: str) -> None:
    for flags, environ, source in (
        ({name: text}, {}, "--" + name.replace("_", "-")),
        ({}, {f"STEPWELL_{name.upper()}": text}, f"STEPWELL_{name.upper()}"),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            resolve(flags, {**ENVIRON, **environ})
        assert str(caught.value).startswith(f"{source}: ")


def test_the_longest_socket_path_is_accepted() -> None:
    assert resolve({"socket": "/" + "s" * 106}, ENVIRON).config.socket == Path("/" + "s" * 106)


def test_a_relative_socket_is_made_absolute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/usr")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert resolve({"socket": "s.sock"}, ENVIRON).config.socket == Path("/usr/s.sock")
    assert resolve({"socket": "~/s.sock"}, ENVIRON).config.socket == Path("/home/somebody/s.sock")


def test_default_socket_is_in_the_users_runtime_folder(tmp_path: Path) -> None:
    runtime, run_user = tmp_path / "runtime", tmp_path / "user"
    fallback = f"/tmp/stepwell-{os.getuid()}/stepwell.sock"
    environ = {"XDG_RUNTIME_DIR": str(runtime)}

    assert default_socket(environ, run_user) == fallback
    own = run_user / str(os.getuid())
    own.mkdir(parents=True)
    assert default_socket(environ, run_user) == f"{own}/stepwell.sock"
    runtime.mkdir()
    assert default_socket(environ, run_user) == f"{runtime}/stepwell.sock"
    assert default_socket({"XDG_RUNTIME_DIR": "relative"}, run_user) == f"{own}/stepwell.sock"
    assert default_socket({}, run_user) == f"{own}/stepwell.sock"


@pytest.mark.skipif(os.getuid() != 0, reason="giving a folder to another user needs root")
def test_default_socket_passes_over_the_folder_of_another_user(tmp_path: Path) -> None:
    os.chown(tmp_path, 12345, -1)
    socket = default_socket({"XDG_RUNTIME_DIR": str(tmp_path)}, tmp_path / "none")
    assert socket == f"/tmp/stepwell-{os.getuid()}/stepwell.sock"


CONFIGS = st.builds(
    Config,
    memory_bytes=st.integers(min_value=1, max_value=1 << 50),
    socket=st.text("abc .-=~'", min_size=1, max_size=90).map(lambda name: Path("/", name)),
    http=st.none()
    | st.builds(
        HttpAddress,
        host=st.sampled_from(["127.0.0.1", "0.0.0.0", "::1", "localhost"]),
        port=st.integers(min_value=0, max_value=65535),
    ),
    disk=st.none() | st.text("abc .-=~'", min_size=1, max_size=90).map(lambda name: Path("/", name)),
    disk_bytes=st.integers(min_value=1, max_value=1 << 50),
    disk_read_bytes_per_s=st.none() | st.integers(min_value=1, max_value=1 << 40),
    disk_write_bytes_per_s=st.none() | st.integers(min_value=1, max_value=1 << 40),
    disk_read_latency_s=st.sampled_from([0.0, 0.0002, 0.05, 1.0, 2.5]),
    eviction=st.sampled_from(["lru", "s3fifo", "fifo"]),
    log_level=st.sampled_from(["debug", "info", "warning", "error"]),
)


@given(CONFIGS)
def test_flags_of_a_configuration_give_it_back(config: Config) -> None:
    """A server started for an engine gets its configuration this way."""
    name_by_flag = {option.flag: option.name for option in OPTIONS.values()}
    typed = (flag.split("=", 1) for flag in to_flags(config))
    flags = {name_by_flag[flag]: text for flag, text in typed}
    assert resolve(flags, {"STEPWELL_MEMORY": "1GiB", "STEPWELL_EVICTION": "fifo"}).config == config


def test_every_option_says_how_to_choose_it() -> None:
    for option in OPTIONS.values():
        assert len(option.help) > 40, option.name
