"""The contract's sections: canonical JSON, digests, comparison, refusal of anything unknown."""

from __future__ import annotations

import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import samples
from eyas_contract import (
    CaptureSpec,
    Contract,
    ContractMismatch,
    DraftSpec,
    InvalidInput,
    Manifest,
    MlaSizes,
    SampleRecord,
    ShardRecord,
    TensorRecord,
    VocabMap,
    compare,
    default_aux_layer_ids,
    draft_tensors,
    require_equal,
)
from eyas_contract.canonical import dumps, from_plain, to_plain
from eyas_contract.engines import sglang
from eyas_contract.engines.loaders import loader
from eyas_contract.engines.wanted import tensors

GOLDEN = Path(__file__).parent / "data" / "contract.json"
GOLDEN_DIGESTS = Path(__file__).parent / "data" / "digests.json"


def test_golden_file_freezes_the_schema(tmp_path: Path) -> None:
    """A change here is a change of schema: raise SCHEMA_VERSION and the package's version with it."""
    written = samples.contract().save(tmp_path)
    assert written.read_text(encoding="utf-8") == GOLDEN.read_text(encoding="utf-8")
    assert samples.contract().digests() == json.loads(GOLDEN_DIGESTS.read_text(encoding="utf-8"))
    assert Contract.load(GOLDEN) == samples.contract()


def test_adding_a_section_leaves_the_other_digests(tmp_path: Path) -> None:
    base = Contract(samples.target(), samples.capture())
    full = base.with_sections(vocab=samples.vocab()).with_sections(draft=samples.draft())
    assert {name: full.digests()[name] for name in base.digests()} == base.digests()
    assert set(full.digests()) == {"target", "capture", "vocab", "draft"}
    base.save(tmp_path)
    assert Contract.load(tmp_path) == base


def test_a_section_is_never_changed() -> None:
    with pytest.raises(ValueError, match="already present"):
        samples.contract().with_sections(vocab=VocabMap(256, tuple(range(96))))


def test_compare_lists_every_difference() -> None:
    other = dataclasses.replace(
        samples.contract(), target=dataclasses.replace(samples.target(), rms_norm_eps=1e-6, dtype="float16"),
        capture=dataclasses.replace(samples.capture(), aux_layer_ids=(2, 6, 9)))
    fields = {m.field for m in compare(other, samples.contract(), "store", "draft")}
    assert fields == {"target.rms_norm_eps", "target.dtype", "capture.aux_layer_ids"}
    with pytest.raises(ContractMismatch) as caught:
        require_equal(other, samples.contract(), "store", "draft", consequence="it would learn other layers",
                      remedy="Extract again.")
    text = str(caught.value)
    assert all(field in text for field in fields)
    assert "[2,6,9]" in text
    assert "[1,5,8]" in text
    assert "Extract again." in text
    assert str(pickle.loads(pickle.dumps(caught.value))) == text


def test_a_long_value_is_told_by_its_beginning_and_digest() -> None:
    other = dataclasses.replace(samples.contract(), vocab=VocabMap(256, tuple(range(96))))
    [difference] = compare(other, samples.contract(), "store", "draft", ("vocab",))
    assert "... (sha256 " in difference.found
    assert len(difference.found) < 130


def test_absent_sections_are_not_differences() -> None:
    assert compare(Contract(samples.target(), samples.capture()), samples.contract(), "a", "b") == ()


@pytest.mark.parametrize("mutate", [
    lambda plain: plain["target"].pop("hidden_size"),
    lambda plain: plain["target"].update(extra=1),
    lambda plain: plain.update(schema_version=2),
    lambda plain: plain["capture"].update(aux_layer_ids=[5, 1, 8]),
    lambda plain: plain["capture"].update(aux_layer_ids=[1, 5, 12]),
    lambda plain: plain["capture"].update(last_state="normed"),
    lambda plain: plain["vocab"].update(target_ids=[1, 1, 2]),
    lambda plain: plain["vocab"].update(target_ids=[0, 256]),
    lambda plain: plain["draft"].update(num_aux=1),
    lambda plain: plain["draft"].update(num_heads=5),
    lambda plain: plain["draft"].update(hidden_size="64"),
    lambda plain: plain["draft"].update(fc_norm=1),
    lambda plain: plain["target"].update(num_layers=True),
    lambda plain: plain.update(target=[]),
])
def test_what_is_wrong_is_refused(tmp_path: Path, mutate: object) -> None:
    plain = to_plain(samples.contract())
    mutate(plain)  # type: ignore[operator]
    (tmp_path / "contract.json").write_text(json.dumps(plain), encoding="utf-8")
    with pytest.raises(InvalidInput, match=r"contract\.json"):
        Contract.load(tmp_path)


@pytest.mark.parametrize(("section", "change", "words"), [
    ("capture", {"hidden_size": 32}, "capture.hidden_size 32, target's 64"),
    ("vocab", {"target_vocab_size": 512}, "vocab.target_vocab_size 512, target's 256"),
    ("draft", {"target_hidden_size": 32}, "draft.target_hidden_size 32, but the other sections say 64"),
    ("draft", {"target_vocab_size": 512}, "draft.target_vocab_size 512, but the other sections say 256"),
    ("draft", {"draft_vocab_size": 64}, "draft.draft_vocab_size 64, but the other sections say 96"),
])
def test_sections_that_contradict_one_another_are_refused(section: str, change: dict[str, int], words: str) -> None:
    wrong = dataclasses.replace(getattr(samples.contract(), section), **change)
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(samples.contract(), **{section: wrong})


def test_every_fault_is_named_at_once(tmp_path: Path) -> None:
    plain = to_plain(samples.contract())
    del plain["target"]["dtype"]
    plain["target"]["colour"] = "red"
    plain["draft"]["head_dim"] = 1.5
    (tmp_path / "contract.json").write_text(json.dumps(plain), encoding="utf-8")
    with pytest.raises(InvalidInput) as caught:
        Contract.load(tmp_path)
    for name in ("target.dtype is missing", "target.colour is unknown", "draft.head_dim is float"):
        assert name in str(caught.value)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner)
                    | st.dictionaries(st.text(), inner), max_leaves=10))
def test_arbitrary_json_never_crashes(plain: object) -> None:
    with pytest.raises(InvalidInput):
        from_plain(Contract, plain, "x")


@given(st.sets(st.integers(0, 255), min_size=1))
def test_vocab_map_round_trip(ids: set[int]) -> None:
    vocab = VocabMap(256, tuple(sorted(ids)))
    assert VocabMap.from_d2t(vocab.d2t(), 256) == vocab
    assert [i for i, marked in enumerate(vocab.t2d()) if marked] == sorted(ids)
    assert vocab.is_full == (len(ids) == 256)


@pytest.mark.parametrize("ids", [(), (-1, 3), (0, 256), (3, 2), (1, 1)])
def test_ids_that_are_no_vocabulary_are_refused(ids: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"ascending, distinct and within 0\.\.255"):
        VocabMap(256, ids)


def test_absolute_ids_are_no_offsets() -> None:
    with pytest.raises(ValueError, match="ascending"):
        VocabMap.from_d2t(list(samples.vocab().target_ids), 256)


def test_default_layers() -> None:
    assert default_aux_layer_ids(61) == (1, 29, 57)
    assert default_aux_layer_ids(30) == (1, 14, 26)
    with pytest.raises(ValueError, match="too few"):
        default_aux_layer_ids(5)


def test_capture_width() -> None:
    assert samples.capture().aux_width == 192
    with pytest.raises(ValueError, match="ascending"):
        CaptureSpec((), 64, "none", (), 10)


def test_canonical_json_is_stable() -> None:
    assert dumps({"b": (1, 2), "a": "\u00e9"}) == '{"a":"\\u00e9","b":[1,2]}'
    with pytest.raises(ValueError, match="not JSON compliant"):
        dumps({"a": float("nan")})


def test_manifest_round_trip(tmp_path: Path) -> None:
    shard = ShardRecord("shard-000000.safetensors", 10, (TensorRecord("input_ids", "I32", (5,), "d" * 64),),
                        (SampleRecord("a", 3, 1), SampleRecord("b", 2, 2)))
    manifest = Manifest((("capture", "e" * 64),), "f" * 64, False, (shard,))
    manifest.save(tmp_path)
    assert Manifest.load(tmp_path) == manifest
    assert (manifest.num_samples, manifest.num_tokens, manifest.num_trained) == (2, 5, 3)
    assert not list(tmp_path.glob(".*.tmp"))


def test_manifests_of_other_versions(tmp_path: Path) -> None:
    """The first is read, with its SHA-256; one that is not known yet is not, nor a tensor without a digest."""
    tensor = TensorRecord("input_ids", "I32", (5,), "d" * 64)
    old = Manifest((), "f" * 64, True, (ShardRecord("shard-000000.safetensors", 10, (tensor,), ()),), 1)
    old.save(tmp_path)
    assert Manifest.load(tmp_path) == old
    assert tensor.digest == ("sha256", "d" * 64)
    for digests in ({}, {"sha256": "d", "xxh3_128": "e"}):
        with pytest.raises(ValueError, match="one of sha256 and xxh3_128"):
            TensorRecord("input_ids", "I32", (5,), **digests)
    path = tmp_path / "manifest.json"
    whole = path.read_text()
    path.write_text(whole.replace('"schema_version": 1', '"schema_version": 3'))
    with pytest.raises(InvalidInput, match="schema_version 3, but this eyas-contract reads 1 and 2"):
        Manifest.load(tmp_path)
    path.write_text(whole.replace('"sha256"', '"md5"'))
    with pytest.raises(InvalidInput, match=r"tensors\[0\].md5 is unknown"):
        Manifest.load(tmp_path)


def mla_draft(**changes: Any) -> DraftSpec:
    return dataclasses.replace(samples.draft(), kind="mla", num_kv_heads=4, head_dim=24,
                               mla=MlaSizes(48, 32, 16, 8, 12), **changes)


def test_an_mla_draft_is_kept_whole_and_told_from_a_llama_draft(tmp_path: Path) -> None:
    """The sizes are no field of a Llama draft's record: see the frozen file."""
    contract = dataclasses.replace(samples.contract(), draft=mla_draft())
    contract.save(tmp_path)
    assert Contract.load(tmp_path) == contract
    assert contract.digests()["draft"] != samples.contract().digests()["draft"]
    assert {m.field for m in compare(contract, samples.contract(), "a", "b")} >= {"draft.kind", "draft.mla"}
    for wrong in ({"kind": "llama"}, {"mla": None}, {"head_dim": 16}, {"num_kv_heads": 2}):
        with pytest.raises(ValueError, match=r"mla|MLA"):
            dataclasses.replace(mla_draft(), **wrong)


@pytest.mark.parametrize(("version", "changes", "words"), [
    ((0, 5, 11), {}, "since 0.5.12"), ((0, 5, 12), {"fc_norm": True}, "since 0.5.13"),
    ((0, 5, 23), {"num_layers": 2}, "2 layers")])
def test_an_mla_draft_that_a_version_does_not_serve_is_not_exported(version: sglang.Version, changes: dict[str, Any],
                                                                    words: str) -> None:
    contract = dataclasses.replace(samples.contract(), draft=mla_draft(**changes))
    with pytest.raises(InvalidInput, match=words):
        sglang.export_config(contract, version)


def test_an_mla_drafts_config_and_tensors_are_what_its_class_builds() -> None:
    config = sglang.export_config(dataclasses.replace(samples.contract(), draft=mla_draft(fc_norm=True)))
    table = loader("sglang", sglang.NEWEST, "mla")
    assert table is not None
    built = tensors(config, table)
    del built["embed_tokens.weight"]
    assert built == draft_tensors(mla_draft(fc_norm=True))
