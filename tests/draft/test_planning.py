"""plan, plot and advise."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from specs import SPEC

from eyas_contract import CorruptFile, InvalidInput
from eyas_draft import cli
from eyas_draft.advise import advise, read_points
from eyas_draft.batches import split
from eyas_draft.config import PlanConfig, PlotConfig, TrainConfig
from eyas_draft.curve import Point, _regressed, fit, outcomes, worth
from eyas_draft.flops import layer_weights, step_flops
from eyas_draft.metrics import read_rows
from eyas_draft.plan import plan
from eyas_draft.plot import plot, read_series
from eyas_draft.store import Store

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from advise_coverage import FOUR, THREE, coverage

TRUE = {"ceiling": 3.0, "scale": 40.0, "exponent": 0.3, "repetitions": 4.0}


def true_length(data: float, epochs: float) -> float:
    seen = worth(np.array([data]), np.array([epochs]), TRUE["repetitions"])[0]
    return float(TRUE["ceiling"] - TRUE["scale"] * seen ** -TRUE["exponent"])


def points(noise: float = 0.0) -> list[Point]:
    rng = np.random.default_rng(5)
    return [Point(run, data, epochs, true_length(data, epochs) + noise * rng.standard_normal())
            for run, data in enumerate((1e5, 2e5, 4e5)) for epochs in (0.5, 1, 2, 3, 4, 6)]


def write_run(folder: Path, data: float, fraction: float) -> Path:
    """A run's metrics as the trainer writes them, following the true curve."""
    folder.mkdir()
    rows: list[dict[str, object]] = []
    for step in range(1, 13):
        rows.append({"step": step, "loss": 2.0, "step_accuracy": [0.5], "tokens": data / 2, "seconds": 1.0})
        rows.append({"step": step, "heldout": {"distinct_tokens": data,
                                               "acceptance_length": true_length(data, step / 2)}})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.resolved.json").write_text(json.dumps({"lr": 1e-3, "fraction": fraction, "epochs": 6}))
    return folder


def test_the_fit_finds_the_curve_it_was_made_from() -> None:
    found = fit(points())
    assert found.error < 2e-3
    for data, epochs in ((8e5, 6.0), (1.6e6, 3.0), (4e5, 12.0)):
        assert found.predict(data, epochs) == pytest.approx(true_length(data, epochs), abs=0.02)


def test_predictions_from_noisy_halves_hold_the_truth_in_their_interval(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / str(n), data, n / 4) for n, data in ((1, 1e5), (2, 2e5), (4, 4e5))]
    _, advice = advise(runs)
    by_name = {row.choice: row for row in advice}
    assert by_name["2x data"].low - 0.01 <= true_length(8e5, 6) <= by_name["2x data"].high + 0.01
    assert by_name["2x epochs"].length == pytest.approx(true_length(4e5, 12), abs=0.02)
    assert by_name["4x data"].tokens == 4 * by_name["as the largest run"].tokens
    assert by_name["2x data"].hours == pytest.approx(8e5 * 6 / 1e5 / 3600, abs=1e-4)


@pytest.mark.parametrize("common", [0.0, 0.5, 0.72])
def test_intervals_hold_what_comes_as_often_as_they_say(common: float) -> None:
    """Runs of many true curves, with noise of which a share is common to a run's measurements: 80 % of outcomes."""
    held = coverage(THREE, FOUR, common, 60)["held"]
    assert 0.72 <= np.mean(list(held.values())) <= 0.9


def test_a_line_is_predicted_as_textbooks_do() -> None:
    rng = np.random.default_rng(2)
    x, new = rng.standard_normal(9), np.array([0.3, 4.0])
    y = 2.0 - 0.7 * x + 0.1 * rng.standard_normal(9)
    found = _regressed(np.eye(9), x[None], y, new[None])
    (slope, level), (squares,), *_ = np.polyfit(x, y, 1, full=True)
    np.testing.assert_allclose(found.expected[0], level + slope * new, rtol=1e-12)
    spread = 1 + 1 / 9 + (new - x.mean()) ** 2 / ((x - x.mean()) ** 2).sum()
    np.testing.assert_allclose(found.deviation[0], np.sqrt(squares / 7 * spread), rtol=1e-12)
    in_other_units = _regressed(np.eye(9) / 2, x[None], y, new[None])  # of the noise, whose size is not known
    np.testing.assert_allclose(in_other_units.evidence, found.evidence, rtol=1e-12)


def test_lengths_that_fall_are_taken_as_noise_around_a_level() -> None:
    falling = [Point(run, data, epochs, 2.5 - 0.01 * epochs - data / 1e7)
               for run, data in enumerate((1e5, 2e5, 4e5)) for epochs in (1, 2, 3)]
    assert fit(falling).predict(8e5, 3) == pytest.approx(np.mean([p.length for p in falling]))
    low, high = np.quantile(outcomes(falling, [(8e5, 3)]), [0.1, 0.9])
    assert 2.4 < low < 2.46 < high < 2.5


def test_measurements_of_the_first_half_epoch_say_nothing(tmp_path: Path) -> None:
    rows = [{"tokens": 40, "seconds": 2.0}, {"heldout": {"distinct_tokens": 100, "acceptance_length": 1.1}},
            {"tokens": 10, "seconds": 3.0}, {"heldout": {"distinct_tokens": 100, "acceptance_length": 1.2}}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"step": 1, **row}) + "\n" for row in rows))
    assert read_points(tmp_path, 7) == ([Point(7, 100, 0.5, 1.2)], 10.0)


def test_too_few_runs_and_unlike_ones_are_refused(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one", 1e5, 0.5)
    with pytest.raises(InvalidInput, match="1 amounts of data"):
        advise([one])
    other = write_run(tmp_path / "other", 2e5, 1.0)
    (other / "config.resolved.json").write_text(json.dumps({"lr": 2e-3, "fraction": 1.0, "epochs": 6}))
    with pytest.raises(InvalidInput, match="other settings: lr"):
        advise([one, other])


def test_fractions_lie_within_one_another_and_hold_out_the_same(store: Path) -> None:
    whole, held = split(Store(store), 0.1, 0)
    half, held_of_half = split(Store(store), 0.1, 0, 0.5)
    quarter, _ = split(Store(store), 0.1, 0, 0.25)
    assert held == held_of_half
    assert set(quarter) < set(half) < set(whole)
    assert len(half) == round(len(whole) / 2)
    with pytest.raises(InvalidInput, match="--fraction"):
        split(Store(store), 0.1, 0, 0.0)


def test_operations_are_those_of_the_products() -> None:
    h, width, kv, i, v = 32, 32, 16, 48, 20
    weights = 2 * h * width + 2 * (2 * h * kv) + width * h + 3 * h * i
    assert layer_weights(SPEC) == weights
    fc, head = 3 * h * h, h * v
    prefix = 4 * width * (10 * 11 / 2)
    one = 2 * 10 * weights + 2 * 6 * head + prefix
    assert step_flops(SPEC, [10], 6, 1) == 3 * one + 2 * (2 * 10 * fc) + 2 * 6 * h * (v + 50)  # states have no gradient
    assert step_flops(SPEC, [10], 6, 2) > 1.7 * step_flops(SPEC, [10], 6, 1)


def test_a_plan_counts_the_draft_and_the_store(store: Path, tiny_target: Path) -> None:
    needs = plan(PlanConfig(tiny_target, store, vocab_size=64, epochs=3, tokens_per_batch=256))
    opened = Store(store)
    assert needs.tokens == 3 * opened.manifest.num_tokens
    assert needs.steps == 3 * math.ceil(opened.manifest.num_tokens / 256)
    assert needs.hours is not None
    twice = plan(PlanConfig(tiny_target, store, vocab_size=64, epochs=3, tokens_per_batch=256, gpus=2))
    assert twice.hours == pytest.approx(needs.hours / 2, abs=1e-3)
    with pytest.raises(InvalidInput, match="--tokens"):
        plan(PlanConfig(tiny_target))


def test_a_plan_takes_the_targets_vocabulary_where_that_is_smaller(tiny_target: Path) -> None:
    """Train's default is larger, and it is not the target's fault."""
    smaller = plan(PlanConfig(tiny_target, tokens=10_000))
    assert smaller == plan(PlanConfig(tiny_target, tokens=10_000, vocab_size=0))


def test_a_plan_is_of_the_run_that_train_would_do() -> None:
    planned = {field.name: field.default for field in dataclasses.fields(PlanConfig)}
    trained = {field.name: field.default for field in dataclasses.fields(TrainConfig)}
    named = planned.keys() & trained.keys() - {"target", "store", "resident"}
    assert {"vocab_size", "epochs", "tokens_per_batch"} < named
    assert {name: planned[name] for name in named} == {name: trained[name] for name in named}


def test_runs_that_are_shown_elsewhere_are_still_alike(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / str(n), n * 1e5, n / 4) for n in (1, 2, 4)]
    path = runs[1] / "config.resolved.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "log_to": ["tensorboard"]}))
    assert len(advise(runs)[1]) == 6


def test_metrics_of_a_run_that_was_killed_are_read_up_to_the_last_whole_line(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 1e5, 1.0)
    whole = read_series(run), read_points(run, 0)
    with (run / "metrics.jsonl").open("a") as sink:
        sink.write('{"step": 13, "loss": 2.0, "ste')
    assert (read_series(run), read_points(run, 0)) == whole
    with (run / "metrics.jsonl").open("a") as sink:
        sink.write("\n")
    with pytest.raises(CorruptFile, match=r"metrics\.jsonl, line 25"):
        read_series(run)


def test_commands_answer(store: Path, tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--target", str(tiny_target), "--tokens", "1000000", "--vocab-size", "64"]) == 0
    assert "GPU memory, each of 1" in capsys.readouterr().out
    runs = [str(write_run(tmp_path / str(n), n * 1e5, n / 4)) for n in (1, 2, 4)]
    assert cli.main(["advise", "--runs", *runs, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["advice"]) == 6
    out = tmp_path / "picture.png"
    assert plot(PlotConfig((tmp_path / "1",), out)) == out
    for name in ("x.txx", "x"):
        with pytest.raises(InvalidInput, match=rf"{name}: .*no kind of picture.*png"):
            plot(PlotConfig((tmp_path / "1",), tmp_path / name))
    assert out.read_bytes()[:4] == b"\x89PNG"


def test_a_target_whose_config_leaves_sizes_null_is_planned_for(tiny_target: Path, tmp_path: Path) -> None:
    """As that of a model whose layers have different widths (Nemotron's DeciLM)."""
    config = json.loads((tiny_target / "config.json").read_text())
    for name, changes in (("null", {"intermediate_size": None, "num_key_value_heads": None}),
                          ("usual", {"intermediate_size": 256, "num_key_value_heads": 4})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config | changes))
    assert plan(PlanConfig(tmp_path / "null", tokens=1000)) == plan(PlanConfig(tmp_path / "usual", tokens=1000))
    (tmp_path / "null" / "config.json").write_text(json.dumps(config | {"intermediate_size": [192] * 8}))
    with pytest.raises(InvalidInput, match="intermediate_size"):
        plan(PlanConfig(tmp_path / "null", tokens=1000))


def test_a_plan_for_a_shallow_target(tiny_target: Path, tmp_path: Path) -> None:
    """Its layers are to be named when its states are extracted; as many as usual are planned for."""
    config = json.loads((tiny_target / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    assert plan(PlanConfig(tmp_path, tokens=1000)).parameters == plan(PlanConfig(tiny_target, tokens=1000)).parameters


def test_records_that_are_none_are_named(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", 1e5, 1.0) / "metrics.jsonl"
    whole = path.read_bytes()
    for raw in (b"[]\n", b"{}\n", b'{"step": "x"}\n', b"\xff\n"):
        path.write_bytes(whole + raw)
        with pytest.raises(CorruptFile, match=r"metrics\.jsonl"):
            read_rows(path)


def test_runs_on_other_samples_of_one_folder_are_not_alike(tmp_path: Path) -> None:
    """A store that was extracted anew holds out other samples: their acceptance lengths are no points of one curve."""
    runs = [write_run(tmp_path / str(n), n * 1e5, n / 4) for n in (1, 2, 4)]
    for run, digest in zip(runs, "aab", strict=True):
        (run / "data.json").write_text(json.dumps({"samples": 9, "sha256": digest}))
    with pytest.raises(InvalidInput, match="other samples"):
        advise(runs)
    (runs[2] / "data.json").unlink()  # made before it was kept
    assert advise(runs)
