import inspect

import pytest
from cyclopts import App

from stepwell.cli.app import app
from stepwell.cli.flags import option_flags
from stepwell.config import OPTIONS

COMMANDS = ["serve", "run", "stats", "clear", "fsck", "config", "demo", "bench"]
SIMULATED = ["trace", "replay", "plan"]  # with commands of their own: see tests/replay
FOR_THE_SERVER = ["serve", "run", "config"]


def help_of(command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", "1000")
    app([command, "--help"], result_action="return_value")
    return capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_flag_says_its_default(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = [line for line in help_of(command, capsys, monkeypatch).splitlines() if line.startswith("│ --")]
    assert flags
    for line in flags:
        assert "Default: " in line, line


@pytest.mark.parametrize(
    ("command", "units"),
    [
        ("serve", ["in bytes", "HOST:PORT", "4GiB", "127.0.0.1:7311"]),
        ("run", ["in bytes", "HOST:PORT", "4GiB", "127.0.0.1:7311"]),
        ("config", ["in bytes", "HOST:PORT", "4GiB", "127.0.0.1:7311"]),
        ("stats", ["bytes, chunks and tokens"]),
        ("clear", ["how many chunks"]),
        ("fsck", ["chunks, spaces, bytes"]),
        ("demo", ["seconds", "tokens", "minutes"]),
        ("bench", ["milliseconds", "MiB"]),
    ],
)
def test_help_of_every_command_names_its_units(
    command: str, units: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = help_of(command, capsys, monkeypatch)
    assert [unit for unit in units if unit not in text] == []


@pytest.mark.parametrize("command", FOR_THE_SERVER)
def test_every_option_is_a_flag(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = help_of(command, capsys, monkeypatch)
    for option in OPTIONS.values():
        assert f"{option.flag} STR" in text
        assert option.help in text.replace("`", "")


def test_the_commands_are_those_promised() -> None:
    assert {name for name in app if not name.startswith("-")} == {*COMMANDS, *SIMULATED}


def test_named_flags_only_and_other_parameters_stay() -> None:
    @option_flags("memory", "log_level")
    def command(*words: str, number: int = 3, **flags: str | None) -> int:
        assert (words, number, flags) == (("a", "--b"), 4, {"memory": "1GiB"})
        return 0

    assert list(inspect.signature(command).parameters) == ["words", "number", "memory", "log_level"]
    small = App()
    small.default(command)
    line = ["--memory", "1GiB", "--number", "4", "--", "a", "--b"]
    assert small(line, result_action="return_value") == 0
