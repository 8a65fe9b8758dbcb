"""Tuning: what is measured, when an arm is stopped, what is advised, and the serve.toml."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tyro

import tiny
from eyas_contract import EngineFailure, InvalidInput
from eyas_contract.commands import expand_config, load_toml
from eyas_serve import ServeConfig, tune
from eyas_serve.cli import COMMANDS
from eyas_serve.client import Client, Generation
from eyas_serve.config import LaunchConfig, TuneConfig
from eyas_serve.measure import Run
from eyas_serve.prompts import Prompt
from eyas_serve.tune import Kept, Shape, advise, as_toml, parse_shapes, run_tune, tune_table


def row(arm: str, concurrency: int, speed: float, stopped: bool = False) -> dict[str, object]:
    return {"arm": arm, "concurrency": concurrency, "tokens_per_second": speed, "stopped_early": stopped,
            "first_tokens_per_second": speed, "data_set": "all"}


def test_advice_and_break_even() -> None:
    rows = [row("none", 1, 100), row("3/1/4", 1, 180), row("3/4/8", 1, 150), row("none", 4, 300), row("3/1/4", 4, 320),
            row("3/4/8", 4, 200, stopped=True), row("none", 16, 900), row("3/1/4", 16, 910)]
    advice = advise(rows, [1, 4, 16])
    assert advice["1"] == {"best": "3/1/4", "tokens_per_second": 180, "speedup": 1.8}
    assert advice["4"]["best"] == "3/1/4"
    assert advice["16"]["best"] == "none"  # 1 % is within noise
    assert advice["break_even"] == 16
    text = tune_table({"rows": rows, "advice": {key: advice[key] for key in ("1", "4", "break_even")}})
    assert "62% *" in text
    assert "200.0" not in text  # of a few requests: no speed to be set beside the others'
    assert "* stopped early" in text
    assert "from 16 at a time on" in text


def test_never_and_always_paying() -> None:
    assert advise([row("none", 1, 100), row("3/1/4", 1, 90)], [1])["break_even"] == 1
    assert advise([row("none", 1, 100), row("3/1/4", 1, 190)], [1])["break_even"] is None
    rows = [row("none", 1, 100)]
    assert "do not speculate here" in tune_table({"rows": rows, "advice": advise(rows, [1])})


def test_a_backend_is_part_of_an_arm_and_of_its_server(tmp_path: Path) -> None:
    config = TuneConfig(target=tmp_path, draft=tmp_path, prompts=tmp_path, extra="--x 1")
    alone, tree = (shape.with_backend("eyas") for shape in parse_shapes(["3/2/6"]))
    assert (alone.config(config, None).draft, alone.config(config, None).extra) == (
        None, "--x 1 --attention-backend eyas")
    assert (tree.config(config, None).draft, tree.config(config, None).extra) == (
        tmp_path, "--x 1 --attention-backend eyas")
    rows = [row("none triton", 1, 100), row("none fa3", 1, 150), row("3/2/6 triton", 1, 152), row("3/2/6 fa3", 1, 140),
            row("none triton", 4, 100), row("none fa3", 4, 90), row("3/2/6 triton", 4, 200)]
    advice = advise(rows, [1, 4])
    assert (advice["1"]["best"], advice["4"]["best"], advice["break_even"]) == ("none fa3", "3/2/6 triton", None)
    assert advice["4"]["speedup"] == 2.0


def short(served: ServeConfig, prompts: Path, **changes: Any) -> TuneConfig:
    """One tree, eight tokens a prompt, each prompt once; reports beside the prompts."""
    return TuneConfig(**{**vars(served), "prompts": prompts, "out": prompts.with_name("tune.json"),
                         "serve_toml": prompts.with_name("serve.toml"), "shapes": ("3/1/4",), "max_new_tokens": 8,
                         "seconds": 0.0, **changes})


def test_shapes_are_judged_together() -> None:
    assert parse_shapes(["3/1/4", "none", "3/2/6"]) == [Shape("none"), Shape("3/1/4", 3, 1, 4), Shape("3/2/6", 3, 2, 6)]
    with pytest.raises(InvalidInput, match=r"4/1/24: draft tokens 24 in a chain of 4 steps.*; 'three': no steps"):
        parse_shapes(["4/1/24", "three"])


def test_toml_is_a_launch_config(tmp_path: Path) -> None:
    config = ServeConfig(target=tmp_path / 'a "b"', draft=tmp_path, topk=2, num_draft_tokens=6, extra="--x 'y z'")
    path = tmp_path / "serve.toml"
    path.write_text(as_toml(config), encoding="utf-8")
    loaded = load_toml(ServeConfig, path)
    assert loaded["target"] == str(config.target)
    assert loaded["extra"] == config.extra
    assert "port" not in loaded
    assert loaded["num_draft_tokens"] == 6


def test_its_toml_is_taken_by_the_command(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.symlink_to(sys.executable)  # as a virtual environment's is
    config = ServeConfig(target=tmp_path / "a \U0001f600", draft=tmp_path, extra="--attention-backend triton",
                         engine_python=python,
                         environment={"HF_TOKEN": "hf_very_secret", "NCCL_DEBUG": "INFO"})
    path = tmp_path / "serve.toml"
    path.write_text(as_toml(config), encoding="utf-8")
    assert "hf_very_secret" not in path.read_text(encoding="utf-8")
    assert "# HF_TOKEN is left out" in path.read_text(encoding="utf-8")
    words = expand_config(["launch", "--config", str(path)], COMMANDS)
    launched = tyro.extras.subcommand_cli_from_dict(dict(COMMANDS), args=words)
    assert isinstance(launched, LaunchConfig)
    for name in ("target", "draft", "extra", "engine_python"):
        assert getattr(launched, name) == getattr(config, name)
    assert launched.environment == {"NCCL_DEBUG": "INFO"}


def test_against_a_scripted_engine(scenario: Callable[..., ServeConfig], tiny_target: Path, tmp_path: Path) -> None:
    served = scenario("ok", target=tiny_target, draft=tmp_path / "draft", preflight=False)
    prompts = tiny.write_jsonl(tmp_path / "prompts.jsonl", tiny.conversations(5))
    config = short(served, prompts, concurrencies=(2, 1), first=2)
    config.serve_toml.write_text("mine = true")
    result = run_tune(config)
    assert (tmp_path / "serve.1.toml").read_text() == "mine = true"
    assert json.loads(config.out.read_text(encoding="utf-8")) == result
    assert [(r["arm"], r["concurrency"]) for r in result["rows"]] == [("none", 1), ("none", 2), ("3/1/4", 1),
                                                                     ("3/1/4", 2)]
    assert all(r["tokens_per_second"] > 0 and r["first_tokens_per_second"] > 0 for r in result["rows"])
    best = result["advice"]["1"]["best"]
    loaded = load_toml(ServeConfig, config.serve_toml)
    assert ("draft" in loaded) == (best != "none")
    assert not {"port", "run_dir", "radix_cache", "metrics", "max_running_requests"} & set(loaded)


def test_no_request_waits_for_room(scenario: Callable[..., ServeConfig], tiny_target: Path, tmp_path: Path) -> None:
    """SGLang runs 48 requests at a time with a draft; the server that is advised has the measured one's room."""
    served = scenario("ok", target=tiny_target, draft=tmp_path / "draft", preflight=False)
    prompts = tiny.write_jsonl(tmp_path / "prompts.jsonl", tiny.conversations(3))
    config = short(served, prompts, concurrencies=(1, 49))
    result = run_tune(config)
    assert {row["room"] for row in result["rows"]} == {49}
    assert "waited" not in tune_table(result)
    assert load_toml(ServeConfig, config.serve_toml)["max_running_requests"] == 49
    few = run_tune(dataclasses.replace(config, max_running_requests=2))
    assert {row["room"] for row in few["rows"]} == {2}
    assert "warning: 3/1/4 ran at most 2 of 49 requests at a time" in tune_table(few)


def test_few_prompts_are_asked_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Eight requests take two seconds, so twenty take five; what is accepted of a prompt counts once."""
    asked = list[int]()

    def look(client: Client, prompts: list[Prompt], *rest: object) -> Run:
        asked.append(len(prompts))
        answers = [Generation((0,) * 10, (4, 2) if n < 3 else (0, 9), 0.1, "length") for n in range(len(prompts))]
        return Run(tuple(answers), len(prompts) / 4, 0.0, tuple(prompts))

    monkeypatch.setattr(tune, "_measure", look)
    monkeypatch.setattr(Client, "room", None)
    config = TuneConfig(target=tmp_path, draft=tmp_path, prompts=tmp_path)
    prompts = [Prompt(str(i), (1,)) for i in range(3)]
    [found] = tune.measure_arm(Client("http://nowhere"), prompts, config, Shape("3/1/4", 3, 1, 4), 4, [])
    assert asked == [8, 20]
    assert found["requests"] == 20
    assert found["tokens_per_second"] == pytest.approx(40)
    assert found["acceptance_length"] == pytest.approx(4 / 3)
    assert found["histogram"] == [12, 6]
    [found] = tune.measure_arm(Client("http://nowhere"), prompts, dataclasses.replace(config, seconds=0.0),
                               Shape("3/1/4", 3, 1, 4), 4, [])
    assert found["requests"] == 8


def test_a_first_look_lasts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Eight requests are over in a tenth of a second; twenty times as many are its look, and fifty its measurement."""
    asked = list[int]()

    def look(client: Client, prompts: list[Prompt], *rest: object) -> Run:
        asked.append(len(prompts))
        answers = [Generation((0,) * (20 if len(prompts) == 8 else 10), (), 0.1, "length") for _ in prompts]
        return Run(tuple(answers), len(prompts) / 80, 0.0, tuple(prompts))

    monkeypatch.setattr(tune, "_measure", look)
    monkeypatch.setattr(Client, "room", None)
    config = TuneConfig(target=tmp_path, draft=tmp_path, prompts=tmp_path, seconds=5.0)
    prompts = [Prompt(str(i), (1,)) for i in range(3)]
    [found] = tune.measure_arm(Client("http://nowhere"), prompts, config, Shape("3/1/4", 3, 1, 4), 4, [])
    assert asked == [8, 160, 400]
    assert (found["requests"], found["first_tokens_per_second"]) == (400, pytest.approx(800))


def test_an_interrupted_run_goes_on(scenario: Callable[..., ServeConfig], tiny_target: Path, tmp_path: Path,
                                    monkeypatch: pytest.MonkeyPatch) -> None:
    """Ended at the tree's second level; what was measured before is on disk, and is not measured again."""
    served = scenario("ok", target=tiny_target, draft=tmp_path / "draft", preflight=False)
    prompts = tiny.write_jsonl(tmp_path / "prompts.jsonl", tiny.conversations(3))
    config = short(served, prompts, concurrencies=(1, 2))
    true, asked = tune.measure_arm, list[tuple[str, int]]()

    def noted(client: Client, given: list[Prompt], settings: TuneConfig, shape: Shape, level: int, *rest: Any) -> Any:
        asked.append((shape.name, level))
        if len(asked) == 4:
            raise KeyboardInterrupt
        return true(client, given, settings, shape, level, *rest)

    monkeypatch.setattr(tune, "measure_arm", noted)
    with pytest.raises(KeyboardInterrupt):
        run_tune(config)
    before = json.loads(config.out.read_text())
    assert [(row["arm"], row["concurrency"]) for row in before["rows"]] == [("none", 1), ("none", 2), ("3/1/4", 1)]
    assert "-" in tune_table(before).splitlines()[2]
    assert not config.serve_toml.exists()
    said: list[str] = []
    result = run_tune(config, said.append)
    assert "after its 3 measurements" in said[0]
    assert asked[4:] == [("3/1/4", 2)]
    assert result["rows"][:3] == before["rows"]
    assert config.serve_toml.exists()
    tiny.write_jsonl(prompts, tiny.conversations(2))
    assert len(run_tune(config)["rows"]) == 4  # complete before: measured anew, with the other prompts
    assert (tmp_path / "tune.1.json").exists()


def test_other_prompts_are_no_continuation(scenario: Callable[..., ServeConfig], tiny_target: Path, tmp_path: Path,
                                           ) -> None:
    served = scenario("ok", target=tiny_target, draft=tmp_path / "draft", preflight=False)
    prompts = tiny.write_jsonl(tmp_path / "prompts.jsonl", tiny.conversations(3))
    config = TuneConfig(**{**vars(served), "prompts": prompts, "out": tmp_path / "tune.json", "concurrencies": (1,)})
    interrupted = Kept(config, [1], print)
    interrupted.rows = [{"arm": "none", "concurrency": 1, "tokens_per_second": 1.0, "stopped_early": False}]
    interrupted.write()
    assert Kept(config, [1], print).missing("none") == []
    tiny.write_jsonl(prompts, tiny.conversations(2))
    assert Kept(config, [1], print).missing("none") == [1]
    assert (tmp_path / "tune.1.json").exists()


@pytest.mark.parametrize(("looks", "stopped", "measured"), [
    ((90.0, 92.0), False, 2), ((50.0, 92.0, 91.0), False, 3), ((50.0, 60.0), True, 2)])
def test_one_slow_look_stops_no_arm(looks: tuple[float, ...], stopped: bool, measured: int,
                                    monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The best arm's first look gave 100 tokens/s; below 85 this one is looked at once more."""
    speeds = list(looks)

    def look(client: Client, prompts: list[Prompt], *rest: object) -> Run:
        return Run(tuple(Generation((0,) * 10, (), 0.1, "length") for _ in prompts),
                   10 * len(prompts) / speeds.pop(0), 0.0, tuple(prompts))

    monkeypatch.setattr(tune, "_measure", look)
    monkeypatch.setattr(Client, "room", None)
    config = TuneConfig(target=tmp_path, draft=tmp_path, prompts=tmp_path, first=2, seconds=0.0)
    best = {"arm": "none", "concurrency": 1, "first_tokens_per_second": 100.0}
    [found] = tune.measure_arm(Client("http://nowhere"), [Prompt(str(i), (1,)) for i in range(4)], config,
                               Shape("3/1/4", 3, 1, 4), 1, [best])
    assert found["stopped_early"] is stopped
    assert len(looks) - len(speeds) == measured


def test_an_arm_that_does_not_start_is_left_out(scenario: Callable[..., ServeConfig], tiny_target: Path, tmp_path: Path,
                                                ) -> None:
    useless = {"FAKE_PLAN": json.dumps({"histogram": [40]})}  # speculation without any acceptance: no READY
    served = scenario("ok", target=tiny_target, draft=tmp_path / "draft", preflight=False, environment=useless)
    prompts = tiny.write_jsonl(tmp_path / "prompts.jsonl", tiny.conversations(2))
    config = short(served, prompts, concurrencies=(1,))
    result = run_tune(config)
    assert list(result["failed"]) == ["3/1/4"]
    assert "of no use" in result["failed"]["3/1/4"]
    assert result["advice"]["1"]["best"] == "none"
    assert "left out: 3/1/4" in tune_table(result)
    dead = dataclasses.replace(config, environment={"FAKE_SCENARIO": "dies"})
    with pytest.raises(EngineFailure, match="lost its disk"):
        run_tune(dead)
