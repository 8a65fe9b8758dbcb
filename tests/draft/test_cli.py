"""The command: exit codes, texts, config files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eyas_draft.cli import main


def test_train_to_verify_through_the_command(store: Path, tiny_target: Path, tmp_path: Path,
                                             capsys: pytest.CaptureFixture[str]) -> None:
    settings = tmp_path / "train.toml"
    settings.write_text(f'store = "{store}"\ntarget = "{tiny_target}"\nout = "{tmp_path / "run"}"\nepochs = 1\n'
                        'vocab-size = 40\ntokens_per_batch = 512\nttt-steps = 2\nprecision = "fp32"\n')
    assert main(["train", "--config", str(settings), "--epochs", "2", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert json.loads((tmp_path / "run" / "config.resolved.json").read_text())["epochs"] == 2
    assert result["acceptance_length"] >= 1
    run, draft = str(tmp_path / "run"), str(tmp_path / "draft")
    assert main(["export", "--run", run, "--out", draft]) == 0
    assert {p.name for p in (tmp_path / "draft").iterdir()} == {
        "config.json", "config.resolved.json", "contract.json", "golden.json", "golden.values",
            "model.safetensors"}
    words = ["verify", "--run", run, "--draft", draft, "--store", str(store), "--target", str(tiny_target), "--json"]
    capsys.readouterr()
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "pass"
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    (tmp_path / "draft" / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.1}))
    assert main(words) == 1
    assert "rms_norm_eps" in capsys.readouterr().out


def test_errors_are_one_text_and_exit_code_1(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["vocab", "--store", str(tmp_path)]) == 1
    shown = capsys.readouterr()
    assert "no such file" in shown.err
    assert "Traceback" not in shown.err
    settings = tmp_path / "x.toml"
    settings.write_text("learning_rate = 1\n")
    assert main(["train", "--config", str(settings)]) == 1
    assert "learning_rate" in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        main(["vocab", "--store", str(store), "--vocab-size", "many"])
    assert caught.value.code == 2


def test_vocab_shows_what_is_lost(store: Path, tiny_target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["vocab", "--store", str(store), "--vocab-size", "12", "--target", str(tiny_target)]) == 0
    assert "left out" in capsys.readouterr().out
    assert main(["vocab", "--store", str(store), "--vocab-size", "12", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert 0 < report["mass"] < 1
    assert report["size"] == 12


def test_a_report_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path,
                                                                    capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "reports").mkdir()
    (tmp_path / "reports" / "old.json").write_text("{}")
    (tmp_path / "file").write_text("")
    for out, found in (("reports", "a folder"), ("file/report.json", "cannot be made")):
        assert main(["eval", "--draft", "none", "--target", "none", "--prompts", "none", "--out",
                     str(tmp_path / out)]) == 1
        assert found in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"reports", "file"}


def test_a_run_and_an_export_that_cannot_be_written_are_told(store: Path, tiny_target: Path, tmp_path: Path,
                                                             capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    train = ["train", "--store", str(store), "--target", str(tiny_target), "--vocab-size", "40", "--max-steps", "1",
             "--tokens-per-batch", "128", "--ttt-steps", "1", "--out"]
    assert main([*train, str(tmp_path / "file" / "run")]) == 1
    assert "cannot be made" in capsys.readouterr().err
    assert main([*train, str(tmp_path / "run")]) == 0
    assert main(["export", "--run", str(tmp_path / "run"), "--out", str(tmp_path / "file" / "draft")]) == 1
    assert "cannot be made" in capsys.readouterr().err
