"""Prompt files and their names, and chat templates, which must give what Hugging Face transformers gives."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

import tiny
from eyas_contract import InvalidInput
from eyas_serve import ServeConfig, proof
from eyas_serve.prompts import load_data_sets, load_prompts
from eyas_serve.renderer import Renderer

TURNS = [{"role": "user", "content": "zähle <eins> & 'zwei' \U0001f426"}, {"role": "assistant", "content": " one two "},
         {"role": "user", "content": "copy red"}]
LOOP = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
TEMPLATES = {
    "strftime_now": "{{ strftime_now('%Y') }}" + LOOP,
    "strftime_now asked for": "{% if strftime_now is defined %}{{ strftime_now(format='%Y') }}{% else %}x{% endif %}",
    "default system prompt": "{% if messages[0].role != 'system' %}[system]be <brief>{% endif %}\n" + LOOP,
    "generation": "{% for m in messages %}\n  {% set x = 'out' %}\n  {%- if m.role == 'assistant' %}\n"
                  "{% generation %}\n{% set x = 'in' %}{{ loop.index }}{{ m.content }}{{ x }}\n{% endgeneration %}\n"
                  "  {%- else -%}\n{{ m.content }}{% endif %}{{ x }}{{ loop.last }}\n{% endfor %}\n",
    "loop controls": "{% for m in messages %}{% if loop.index == 2 %}{% continue %}{% endif %}{{ m.content }}"
                     "{% if loop.index == 3 %}{% break %}{% endif %}{% endfor %}",
    "tools and documents": "{{ tools is not none }}{{ tools is defined }}{{ documents is none }}"
                           "{% if tools is not none %}[tools]{% endif %}" + LOOP,
    "tojson": "{{ messages | tojson }}{{ messages | tojson(indent=2) }}{{ messages | tojson(True) }}"
              "{{ messages | tojson(separators=(',', ':'), sort_keys=true) }}",
    "special tokens": "{{ bos_token is defined }}{{ bos_token }}{{ eos_token }}{{ pad_token }}"
                      "{{ unk_token is defined }}{{ image_token }}" + LOOP,
    "generation prompt": LOOP + "{% if add_generation_prompt %}[assistant]{% endif %}\n",
}


@pytest.fixture
def target(tiny_target: Path, tmp_path: Path) -> Callable[..., Path]:
    """`target(template)` -> a folder with the tiny target's tokenizer and that template."""
    def make(template: str, **settings: Any) -> Path:
        folder = tmp_path / "target"
        folder.mkdir(exist_ok=True)
        shutil.copy(tiny_target / "tokenizer.json", folder)
        old = json.loads((tiny_target / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps({**old, **settings}))
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
        return folder

    return make


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_find_what_transformers_offers_them(name: str, target: Callable[..., Path]) -> None:
    folder = target(TEMPLATES[name], image_token="<|im_start|>")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    wanted = tokenizer.apply_chat_template(TURNS, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert wanted
    assert tokenizer.decode(Renderer(folder).encode(TURNS)) == tokenizer.decode(wanted)
    assert list(Renderer(folder).encode(TURNS)) == wanted


def test_older_folders_are_read_as_transformers_reads_them(target: Callable[..., Path]) -> None:
    folder = target("", chat_template=[{"name": "tool_use", "template": "tools"},
                                       {"name": "default", "template": "{{ sep_token }}" + LOOP}])
    (folder / "chat_template.jinja").unlink()
    (folder / "special_tokens_map.json").write_text(json.dumps({"sep_token": {
        "content": "<|endoftext|>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}}))
    core = json.loads((folder / "tokenizer.json").read_text())
    core |= {"truncation": {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}}
    (folder / "tokenizer.json").write_text(json.dumps(core))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    wanted = tokenizer.apply_chat_template(TURNS, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert len(wanted) > 3
    assert list(Renderer(folder).encode(TURNS)) == wanted


@pytest.mark.parametrize(("template", "complaint"), [
    ("one\n{% nonsense %}", r"Encountered unknown tag 'nonsense'.*\(line 2\)"), ("{{ x | nofilter }}", "nofilter"),
    ("{{ nothing() }}", "'nothing' is undefined"), ("{{ raise_exception('not so') }}", "not so"),
    ("{{ messages + 1 }}", "TypeError")])
def test_a_template_that_cannot_be_rendered_is_bad_input(template: str, complaint: str, target: Callable[..., Path],
                                                         tmp_path: Path) -> None:
    folder = target(template)
    with pytest.raises(InvalidInput, match=f"the chat template says: .*{complaint}") as caught:
        Renderer(folder).encode(TURNS)
    assert caught.value.where == str(folder / "chat_template.jinja")
    with pytest.raises(InvalidInput, match=complaint):
        load_prompts(tiny.write_jsonl(tmp_path / "q.jsonl", [{"messages": TURNS}]), folder)


def test_a_broken_tokenizer_is_bad_input(target: Callable[..., Path]) -> None:
    folder = target(LOOP)
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(InvalidInput, match=r"chat_template\.jinja: unreadable"):
        Renderer(folder)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(InvalidInput, match=r"tokenizer\.json: unreadable"):
        Renderer(folder)


@pytest.mark.parametrize("template", ["{% nonsense %}", "{{ nothing() }}"])
def test_a_launch_does_without_a_template_that_cannot_be_rendered(
        template: str, target: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = ServeConfig(target=target(template), draft=tmp_path)
    assert list(proof.proof_prompts(config)) == [[1, 2, 3, 4]]
    (tmp_path / "golden.json").touch()
    record = SimpleNamespace(golden=SimpleNamespace(input_ids=(5, 6)))
    monkeypatch.setattr(proof, "load_golden", lambda draft: record)
    assert list(proof.proof_prompts(config)) == [[5, 6]]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_only_newlines_end_a_line(end: str, target: Callable[..., Path], tmp_path: Path) -> None:
    words = ["a\u2028b\u0085c\u2029d", "second"]
    rows = [json.dumps({"messages": [{"role": "user", "content": text}]}, ensure_ascii=False) for text in words]
    file = tmp_path / "q.jsonl"
    file.write_bytes(end.join([*rows, ""]).encode())
    folder = target(LOOP)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    texts = [tokenizer.decode(prompt.input_ids) for prompt in load_prompts(file, folder)]
    assert texts == [f"[user]{text}" for text in words]


def questions(path: Path, count: int, **fields: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return tiny.write_jsonl(path, [{"messages": TURNS, **fields}] * count)


@pytest.mark.parametrize(("files", "names"), [
    (("mt.jsonl", "a/question.jsonl", "b/question.jsonl"), ("mt", "a/question", "b/question")),
    (("a/x/q.jsonl", "b/x/q.jsonl", "b/y/q.jsonl"), ("a/x/q", "b/x/q", "y/q")),
    (("d/all.jsonl", "d/other.jsonl"), ("d/all", "other")),
])
def test_data_sets_have_names_of_their_own(files: tuple[str, ...], names: tuple[str, ...], tiny_target: Path,
                                           tmp_path: Path) -> None:
    paths = [questions(tmp_path / file, 2) for file in files]
    prompts = load_data_sets(paths, tiny_target, limit=1)
    assert [prompt.data_set for prompt in prompts] == list(names)
    assert [prompt.id for prompt in prompts] == [f"{name}/1" for name in names]


def test_names_at_last_are_paths_and_no_file_counts_twice(tiny_target: Path, tmp_path: Path,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    paths = [questions(Path(name), 1, id=name) for name in ("q.json", "q.jsonl", "all.jsonl")]
    prompts = load_data_sets(paths, tiny_target)
    assert [prompt.data_set for prompt in prompts] == [str(tmp_path / "q.json"), str(tmp_path / "q.jsonl"),
                                                       f"{tmp_path.name}/all"]
    assert [prompt.id for prompt in prompts] == ["q.json", "q.jsonl", "all.jsonl"]  # no two alike: as they were
    with pytest.raises(InvalidInput, match="given more than once"):
        load_data_sets([Path("q.json"), tmp_path / "x" / ".." / "q.json"], tiny_target)


def test_live_conversations_of_several_files_keep_their_order(tiny_target: Path, tmp_path: Path) -> None:
    paths = [questions(tmp_path / name, 1) for name in ("a.jsonl", "b.jsonl")]
    prompts = load_data_sets(paths, tiny_target, turns="live")
    assert [prompt.ids for prompt in prompts] == [["a/1/1", "a/1/2"], ["b/1/1", "b/1/2"]]
    after = prompts[1].follow([1])
    assert after is not None
    assert (after.id, after.data_set) == ("b/1/2", "b")
