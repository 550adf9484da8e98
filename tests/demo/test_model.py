"""Where the demo's model lies and what is said where it cannot be made (tests/e2e serve it for real)."""

from pathlib import Path

import pytest

from stepwell.demo import model


def test_the_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("STEPWELL_MODEL_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert model.model_dir() == tmp_path / "stepwell" / "models" / "smollm2-135m-instruct"
    monkeypatch.setenv("STEPWELL_MODEL_DIR", str(tmp_path / "mine"))
    assert model.model_dir() == tmp_path / "mine"


def test_a_folder_that_is_there_is_used_as_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("STEPWELL_MODEL_DIR", str(tmp_path))
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    assert model.ensure_model() == tmp_path


def test_a_folder_with_something_else_in_it_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("STEPWELL_MODEL_DIR", str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(model.ModelError, match="is not a model folder"):
        model.ensure_model()
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_the_race_to_make_it_has_one_winner_and_no_litter(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    target = tmp_path / "model"
    monkeypatch.setenv("STEPWELL_MODEL_DIR", str(target))
    monkeypatch.setattr(model, "find_gguf", lambda: tmp_path / "weights.gguf")

    def fill(folder: Path, mark: str) -> None:
        folder.mkdir(exist_ok=True)
        for name in ("config.json", "tokenizer.json", "model.safetensors"):
            (folder / name).write_text(mark)

    def convert(_gguf: Path, folder: Path) -> None:
        fill(folder, "second")
        fill(target, "first")  # another process was quicker

    monkeypatch.setattr(model, "convert", convert)
    assert model.ensure_model() == target
    assert (target / "config.json").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_missing_package_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("STEPWELL_MODEL_DIR", str(tmp_path / "model"))
    monkeypatch.setattr(model, "GGUF_PACKAGE", "no_such_package_of_weights")
    with pytest.raises(model.ModelError, match="make setup"):
        model.ensure_model()
