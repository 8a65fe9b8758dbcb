"""Extraction through an engine: the same store as by Hugging Face, and what every fault of an engine comes to."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import tiny
from eyas_contract import ContractMismatch, EngineFailure, InvalidInput, Manifest
from eyas_contract.ports import free_port
from eyas_contract.safetensors_header import read_header
from eyas_extract import engine_run
from eyas_extract.check import check, read_tensor
from eyas_extract.cli import main
from eyas_extract.config import RepairConfig, RunConfig
from eyas_extract.conversations import read_rejects
from eyas_extract.inside.sink import Piece
from eyas_extract.repair import repair
from eyas_extract.run import run

sys.path.insert(0, str(Path(__file__).parent))

from fake_capture import FakeEngine

Engines = Callable[..., FakeEngine]
KILLER = Path(__file__).parent / "killer.py"
FAKE = Path(__file__).parent / "fake_capture.py"


@pytest.fixture
def engines(tiny_target: Path, tmp_path: Path) -> Iterator[Engines]:
    """Starts fake engines in this process; all end with the test."""
    made: list[FakeEngine] = []

    def start(**settings: Any) -> FakeEngine:
        made.append(FakeEngine(tiny_target, tmp_path, **settings))
        return made[-1]

    yield start
    for engine in made:
        engine.close()


@pytest.fixture
def process(tiny_target: Path, tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Starts fake engines as processes; returns the URL."""
    made: list[subprocess.Popen[str]] = []

    def start(*arguments: object, port: int = 0) -> str:
        made.append(subprocess.Popen([sys.executable, str(FAKE), str(tiny_target), str(tmp_path), str(port),
                                      *map(str, arguments)], stdout=subprocess.PIPE, text=True))
        assert made[-1].stdout
        return made[-1].stdout.readline().strip()

    yield start
    for each in made:
        each.kill()
        each.wait()
        assert each.stdout
        each.stdout.close()


def tensors(store: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a store, its shards one after another."""
    parts: dict[str, list[torch.Tensor]] = {}
    for shard in Manifest.load(store).shards:
        for name, info in read_header(store / shard.file).tensors.items():
            parts.setdefault(name, []).append(read_tensor(info).float())
    return {name: torch.cat(tensors) for name, tensors in parts.items()}


def require_same(store: Path, wanted: Path) -> None:
    """Same samples in the same shards; states within rounding."""
    a, b = Manifest.load(store), Manifest.load(wanted)
    assert [s.samples for s in a.shards] == [s.samples for s in b.shards]
    assert a.complete
    found, right = tensors(store), tensors(wanted)
    for name in ("input_ids", "loss_mask", "sample_offsets"):
        assert torch.equal(found[name], right[name])
    for name in ("aux_hidden_states", "last_hidden_state"):
        assert (found[name] - right[name]).norm() < 1e-5 * right[name].norm()
    assert not check(store).damage
    assert not list(store.glob(".shard*"))


def settings(tiny_target: Path, answers: Path, tmp_path: Path, *urls: str, **more: Any) -> RunConfig:
    return RunConfig(tiny_target, answers, tmp_path / "store", shard_tokens=300, engine="sglang", servers=urls,
                     aux_layers=(1, 3, 4), ahead=2, **more)


def test_same_store_as_by_hugging_face(engines: Engines, tiny_target: Path, answers: Path, finished: Path,
                                       tmp_path: Path) -> None:
    done = run(settings(tiny_target, answers, tmp_path, engines().url, engines(chunk=7).url))
    require_same(tmp_path / "store", finished)
    assert "layers proved" in done.check
    assert done.samples == 40


def test_rows_that_never_came_are_asked_for_again(engines: Engines, tiny_target: Path, answers: Path, finished: Path,
                                                  tmp_path: Path) -> None:
    """As on a prefix-cache hit: the first chunk is missing, the first time."""
    missed: set[tuple[str, int]] = set()

    def fault(piece: Piece, rows: list[torch.Tensor]) -> list[Piece]:
        key = (piece.mark.path, piece.mark.first)
        if piece.position == 0 and piece.mark.rows > 20 and key not in missed:
            missed.add(key)
            return []
        return [piece]

    run(settings(tiny_target, answers, tmp_path, engines(chunk=20, fault=fault).url))
    assert missed
    require_same(tmp_path / "store", finished)


def test_rows_that_never_come_are_refused(engines: Engines, tiny_target: Path, answers: Path, tmp_path: Path) -> None:
    def fault(piece: Piece, rows: list[torch.Tensor]) -> list[Piece]:
        return [piece] if piece.position else []

    with pytest.raises(EngineFailure, match="8 rows missing at the front: prefix cache on"):
        run(settings(tiny_target, answers, tmp_path, engines(chunk=8, fault=fault).url))
    assert not Manifest.load(tmp_path / "store").shards
    assert not list((tmp_path / "store").glob(".shard*"))


def test_bad_values_reject_their_sample_alone(engines: Engines, tiny_target: Path, answers: Path, finished: Path,
                                              tmp_path: Path) -> None:
    """One state of the third sample of some shard is NaN; the check's own prompt is spared."""
    hit: list[int] = []

    def fault(piece: Piece, rows: list[torch.Tensor]) -> list[Piece]:
        if not hit and piece.mark.first > 60:
            hit.append(piece.mark.first)
            rows[1] = rows[1].clone()
            rows[1][0, 3] = torch.nan
        return [piece]

    done = run(settings(tiny_target, answers, tmp_path, engines(fault=fault).url))
    assert done.rejected == {"non-finite values in the states of layer N": 1}
    assert done.samples == 39
    assert not check(tmp_path / "store").damage
    kept = [s.id for shard in Manifest.load(tmp_path / "store").shards for s in shard.samples]
    everyone = [s.id for shard in Manifest.load(finished).shards for s in shard.samples]
    assert len(set(everyone) - set(kept)) == 1


def test_a_sample_that_the_server_refuses_is_rejected_alone(engines: Engines, tiny_target: Path, answers: Path,
                                                             finished: Path, tmp_path: Path) -> None:
    """A server of a smaller context than the target's config says."""
    shards = Manifest.load(finished).shards
    most = max(sample.tokens for shard in shards for sample in shard.samples)
    data = tmp_path / "reversed.jsonl"  # the first check is made of a row that is not among the longest
    data.write_text("\n".join(reversed(answers.read_text().splitlines())) + "\n")
    done = run(settings(tiny_target, data, tmp_path, engines(positions=most).url))
    rejects = [json.loads(line) for line in (tmp_path / "store" / "rejects.jsonl").read_text().splitlines()]
    everyone = {s.id: s.tokens for shard in shards for s in shard.samples}
    assert {r["id"] for r in rejects} == {name for name, tokens in everyone.items() if tokens == most}
    assert done.samples == 40 - len(rejects)
    assert all("the server refuses: HTTP 400: " in r["reason"] for r in rejects)
    assert not check(tmp_path / "store").damage


def test_a_server_that_refuses_everything_is_no_reason_to_reject(engines: Engines, tiny_target: Path, answers: Path,
                                                                 tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="the server refuses: HTTP 400"):
        run(settings(tiny_target, answers, tmp_path, engines(positions=1).url))


def test_other_layers_are_refused(engines: Engines, tiny_target: Path, answers: Path, tmp_path: Path) -> None:
    with pytest.raises(ContractMismatch, match=r"aux_layer_ids: \(0, 3, 4\) in FakeForCausalLM in SGLang 0.0.0"):
        run(settings(tiny_target, answers, tmp_path, engines(aux=(0, 3, 4)).url))


def test_another_target_in_the_engine_is_refused(tiny_target: Path, answers: Path, tmp_path: Path,
                                                 poisoned_target: Path) -> None:
    """The engine's weights are not those of --target: its states do not lead to its log-probabilities by our head."""
    changed = tmp_path / "changed"
    changed.mkdir()
    for file in tiny_target.iterdir():
        (changed / file.name).write_bytes(file.read_bytes())
    raw = bytearray((changed / "model.safetensors").read_bytes())
    raw[-4000:] = bytes(4000)  # the end of the final norm and of the last layer
    (changed / "model.safetensors").write_bytes(raw)
    engine = FakeEngine(changed, tmp_path)
    try:
        with pytest.raises(InvalidInput, match=r"FakeForCausalLM in SGLang 0\.0\.0: head\(norm\(last\)\) differs"):
            run(settings(tiny_target, answers, tmp_path, engine.url))
    finally:
        engine.close()


def test_a_plug_in_that_is_not_there(engines: Engines, tiny_target: Path, answers: Path, tmp_path: Path,
                                     monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyas_extract.engine_run.CHECK_PATIENCE", 0.3)
    engine = engines()
    engine.silent = True
    with pytest.raises(EngineFailure, match="Is the plug-in loaded there, with this store's folder"):
        run(settings(tiny_target, answers, tmp_path, engine.url))


def test_a_killed_server_costs_what_it_had_in_flight(process: Callable[..., str], engines: Engines, tiny_target: Path,
                                                     answers: Path, finished: Path, tmp_path: Path,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two servers dies by SIGKILL in the middle of a shard; the other does its samples again."""
    monkeypatch.setattr("eyas_extract.engine_run.PATIENCE", 0.5)
    other = engines()
    run(settings(tiny_target, answers, tmp_path, process("--die-after", 12), other.url))
    require_same(tmp_path / "store", finished)
    assert other.seen < 60


def test_a_killed_writer_ends_its_engine(process: Callable[..., str], engines: Engines, tiny_target: Path,
                                         answers: Path, finished: Path, tmp_path: Path,
                                         monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGKILL of the process that writes for one of two engines, after the first check: the other does everything."""
    monkeypatch.setattr("eyas_extract.engine_run.PATIENCE", 0.5)
    url, other = process(), engines()
    mine = other.ring.writer.pid
    [writer] = [p for p in psutil.Process().children(recursive=True)
                if "eyas_extract.inside.writer" in p.cmdline() and p.pid != mine]
    check_first = engine_run.first_check

    def checked(source: Any, *arguments: Any) -> str:
        found = check_first(source, *arguments)
        if source.server.url == url:
            writer.kill()
        return found

    monkeypatch.setattr(engine_run, "first_check", checked)
    engine = writer.parent()
    assert engine
    run(settings(tiny_target, answers, tmp_path, url, other.url))
    assert not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE
    assert other.seen == 42  # the check took two
    require_same(tmp_path / "store", finished)


def test_the_last_server_killed_and_started_again(process: Callable[..., str], tiny_target: Path, answers: Path,
                                                  finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                                  ) -> None:
    """Without another server the run ends with the reason; the same command goes on from the last whole shard."""
    monkeypatch.setattr("eyas_extract.engine_run.PATIENCE", 0.5)
    port = free_port()
    config = settings(tiny_target, answers, tmp_path, process("--die-after", 30, port=port))
    with pytest.raises(EngineFailure, match="Start it again"):
        run(config)
    held = len(Manifest.load(tmp_path / "store").shards)
    assert 0 < held < len(Manifest.load(finished).shards)
    process(port=port)
    run(config)
    require_same(tmp_path / "store", finished)


@pytest.fixture(scope="module")
def killed_at() -> Iterator[Callable[[list[str], dict[str, int]], int]]:
    """Runs the command in a child that is killed, or limited, as the job says; returns its exit status."""
    with subprocess.Popen([sys.executable, str(KILLER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          text=True) as killer:
        def inner(argv: list[str], job: dict[str, int]) -> int:
            assert killer.stdin
            assert killer.stdout
            killer.stdin.write(json.dumps({"argv": argv, **job}) + "\n")
            killer.stdin.flush()
            return int(killer.stdout.readline())

        yield inner


@pytest.fixture(scope="module")
def lasting(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a process that serves all tests of this file."""
    with subprocess.Popen([sys.executable, str(FAKE), str(tiny_target), str(tmp_path_factory.getbasetemp()), "0"],
                          stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        yield process.stdout.readline().strip()
        process.kill()


def argv(target: Path, answers: Path, tmp_path: Path, url: str) -> list[str]:
    return ["run", "--engine", "sglang", "--servers", url, "--target", str(target), "--data", str(answers), "--out",
            str(tmp_path / "store"), "--aux-layers", "1", "3", "4", "--shard-tokens", "300", "--ahead", "2"]


def test_killed_writer_goes_on_where_it_stopped(lasting: str, killed_at: Any, tiny_target: Path,
                                                answers: Path, finished: Path, tmp_path: Path) -> None:
    """SIGKILL at a dozen syncs and renames, one run after another, while the engine goes on writing what was asked."""
    words = argv(tiny_target, answers, tmp_path, lasting)
    codes = [killed_at(words, {"at": number}) for number in (1, 2, 4, 7, 10, 12, 15, 18, 21, 24)]
    assert codes[:6] == [-9] * 6
    assert killed_at(words, {}) == 0
    require_same(tmp_path / "store", finished)


def test_full_disk_loses_nothing(lasting: str, killed_at: Any, tiny_target: Path, answers: Path,
                                 finished: Path, tmp_path: Path) -> None:
    """Room for the check's file but for no shard; then there is room."""
    words = argv(tiny_target, answers, tmp_path, lasting)
    log = tmp_path / "log"
    assert killed_at(words, {"file_limit": 100_000, "log": str(log)}) == 1
    assert "no room to write" in log.read_text()
    assert not list((tmp_path / "store").glob(".shard*"))
    assert killed_at(words, {}) == 0
    require_same(tmp_path / "store", finished)


def test_repair_through_an_engine(engines: Engines, tiny_target: Path, answers: Path, finished: Path, tmp_path: Path
                                  ) -> None:
    config = settings(tiny_target, answers, tmp_path, engines().url)
    run(config)
    path = tmp_path / "store" / "shard-000001.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-5000] ^= 1
    path.write_bytes(raw)
    done = repair(RepairConfig(**vars(config)))
    assert done.shards == ("shard-000001.safetensors",)
    require_same(tmp_path / "store", finished)


def test_repair_through_an_engine_rejects_what_is_bad_now(engines: Engines, tiny_target: Path, answers: Path,
                                                          tmp_path: Path) -> None:
    repairing: list[int] = []

    def fault(piece: Piece, rows: list[torch.Tensor]) -> list[Piece]:
        if repairing and piece.mark.first > 60:
            rows[1] = rows[1].clone()
            rows[1][0, 3] = torch.nan
        return [piece]

    config = settings(tiny_target, answers, tmp_path, engines(fault=fault).url)
    run(config)
    shard = Manifest.load(tmp_path / "store").shards[1]
    (tmp_path / "store" / shard.file).unlink()
    repairing.append(1)
    done = repair(RepairConfig(**vars(config)))
    kept = {s.id for s in Manifest.load(tmp_path / "store").shards[1].samples}
    assert done.rejects
    assert {s.id for s in shard.samples} - kept == {reject.id for reject in done.rejects}
    assert tuple(read_rejects(tmp_path / "store" / "rejects.jsonl")) == done.rejects


def test_fp8_takes_half_the_bytes(engines: Engines, tiny_target: Path, answers: Path, finished: Path, tmp_path: Path
                                  ) -> None:
    done = run(settings(tiny_target, answers, tmp_path, engines(store_dtype="F8_E4M3").url, store_dtype="fp8"))
    assert "gathered by eyas_native" in done.check
    found, right = tensors(tmp_path / "store"), tensors(finished)
    for name, scales in (("aux_hidden_states", "aux_scales"), ("last_hidden_state", "last_scale")):
        width = found[scales].shape[1]
        states = (found[name].view(len(found[name]), width, -1) * found[scales][:, :, None]).view(found[name].shape)
        assert (states - right[name]).norm() < 0.04 * right[name].norm()
        assert (states - right[name]).abs().max() <= right[name].abs().max() / 16
    assert not check(tmp_path / "store").damage


def test_reordered_input_is_refused_and_duplicates_are_rejected(engines: Engines, tiny_target: Path, answers: Path,
                                                                finished: Path, tmp_path: Path) -> None:
    lines = answers.read_text().splitlines()
    twice = tmp_path / "twice.jsonl"
    twice.write_text("\n".join([*lines, lines[4], lines[0]]) + "\n")
    url = engines().url
    done = run(settings(tiny_target, twice, tmp_path, url))
    assert done.rejected == {"id already used on line N": 2}
    assert tensors(tmp_path / "store")["input_ids"].equal(tensors(finished)["input_ids"])
    twice.write_text("\n".join([*reversed(lines), lines[4], lines[0]]) + "\n")
    with pytest.raises(ContractMismatch, match=r"source\.input_sha256"):
        run(settings(tiny_target, twice, tmp_path, url))


def test_command_line(engines: Engines, tiny_target: Path, answers: Path, tmp_path: Path,
                      capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["run", "--engine", "sglang", "--servers", engines().url, "--target", str(tiny_target), "--data",
              str(answers), "--out", str(tmp_path / "store"), "--aux-layers", "1", "3", "4"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert "target checked: FakeForCausalLM in SGLang 0.0.0: layers proved; head(norm(last)) gives" in text


def test_a_server_that_is_not_there(tiny_target: Path, tmp_path: Path) -> None:
    rows = tiny.write_jsonl(tmp_path / "rows.jsonl", [{"messages": [
        {"role": "user", "content": "count from one to two"}, {"role": "assistant", "content": "one two"}]}])
    with pytest.raises(EngineFailure, match="no answer to the health check"):
        run(settings(tiny_target, rows, tmp_path, f"http://127.0.0.1:{free_port()}"))
