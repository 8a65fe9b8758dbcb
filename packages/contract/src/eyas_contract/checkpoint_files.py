"""Which files make up a model folder's checkpoint, and all their tensors; trusts neither names nor links."""

from __future__ import annotations

import json
import stat
from pathlib import Path

from eyas_contract.errors import InvalidInput
from eyas_contract.safetensors_header import MAX_VALUE_BYTES, TensorInfo, read_header
from eyas_contract.torch_zip import read_torch_zip

NO_WEIGHTS = ("training_args.bin", "optimizer.bin")  # SGLang's `filter_files_not_needed_for_inference`
INDEX_NAME, SINGLE_NAME = "model.safetensors.index.json", "model.safetensors"


def has_weights(folder: Path) -> bool:
    """Whether a folder holds safetensors files, an index that names some, or files by torch.save."""
    return (folder / INDEX_NAME).exists() or any(True for _ in folder.glob("*.safetensors")) \
        or bool(pickled_files(folder))


def pickled_files(folder: Path) -> list[Path]:
    """Weight files by torch.save, which engines read where there is no safetensors file."""
    return sorted(path for path in folder.glob("*.bin") if not path.name.endswith(NO_WEIGHTS))


def require_inside(path: Path, folder: Path) -> None:
    """Refuse a file that is no regular one, or a link out of the folder (Hugging Face's cache layout is allowed).

    Raises:
        InvalidInput: special file, broken link, or a link that leads elsewhere.
    """
    wanted = "a regular file of this folder, by eyas-contract"
    if not path.exists():
        raise InvalidInput(str(path), "a broken link", wanted, "Fetch the file.")
    if not stat.S_ISREG(path.stat().st_mode):
        raise InvalidInput(str(path), "no regular file", wanted, "Remove it.")
    real, home = path.resolve(), folder.resolve()
    cache = home.parent.parent / "blobs" if home.parent.name == "snapshots" else home
    if home not in real.parents and cache not in real.parents:
        raise InvalidInput(str(path), f"a link to {real}", wanted, "Copy the file itself into the folder.")


def read_checkpoint(folder: Path) -> dict[str, TensorInfo]:
    """All tensors of the files that engines read in a model folder.

    Raises:
        InvalidInput: as `weight_files`, or a tensor that stands in two files.
        CorruptFile: a damaged file.
    """
    result: dict[str, TensorInfo] = {}
    for file in weight_files(folder):
        require_inside(file, folder)
        tensors = read_torch_zip(file) if file.suffix == ".bin" else read_header(file).tensors
        twice = sorted(set(result) & set(tensors))
        if twice:
            raise InvalidInput(str(file), f"{len(twice)} tensors that another file has too: {twice[:3]}",
                               "each tensor in one file, by the Hugging Face format", "Remove the stale files.")
        result |= tensors
    return result


def weight_files(folder: Path) -> list[Path]:
    """Those of `served`, where Transformers would read the same.

    Raises:
        InvalidInput: as `served`, or an index that does not name the `model.safetensors` beside it.
    """
    (files, _), single = served(folder), folder / SINGLE_NAME
    if single not in files and (single.exists() or single.is_symlink()):  # only an index leaves it out
        raise InvalidInput(str(single), f"beside {INDEX_NAME}, which names other files",
                           "one checkpoint: engines read the index's files, Transformers this one",
                           "Remove whichever is stale.")
    return files


def served(folder: Path) -> tuple[list[Path], dict[str, str]]:
    """The files that engines read, and the index's tensor names -> file names, empty where there is no index.

    They are those that the index names, else every `*.safetensors`, else every `*.bin`.
    `model.safetensors` comes first to Transformers alone; engines take it for one file among others (SGLang's and
    vLLM's `filter_duplicate_safetensors_files`), but for a lone `consolidated.safetensors` beside it.

    Raises:
        InvalidInput: no weights, an index that cannot be read, or that names files which are absent or lie elsewhere.
    """
    if (folder / INDEX_NAME).exists():
        index = _read_index(folder)
        return [folder / name for name in sorted(set(index.values()))], index
    files = sorted(folder.glob("*.safetensors")) or pickled_files(folder)
    if [file.name for file in files] == ["consolidated.safetensors", SINGLE_NAME]:
        return files[1:], {}
    if not files:
        raise InvalidInput(str(folder), "no *.safetensors or *.bin file", "a checkpoint, by eyas-contract",
                           "Give the folder that holds the weights.")
    return files, {}


def weight_sizes(folder: Path) -> list[int]:
    """Bytes of each file of `served`; none where they cannot be told (`check` says why)."""
    try:
        return [file.stat().st_size for file in served(folder)[0]]
    except (InvalidInput, OSError):
        return []


def _read_index(folder: Path) -> dict[str, str]:
    index = folder / INDEX_NAME
    wanted = "`weight_map` of tensor names to files in the same folder, by the Hugging Face format"
    require_inside(index, folder)
    if index.stat().st_size > MAX_VALUE_BYTES:
        raise InvalidInput(str(index), f"{index.stat().st_size} bytes", wanted, "Restore the file.")
    try:
        mapping: dict[str, str] = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"].items())
        bad = [n for n in set(mapping.values()) if not isinstance(n, str) or Path(n).name != n
               or not (folder / n).is_file()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError) as error:
        raise InvalidInput(str(index), f"unreadable ({type(error).__name__}: {error})"[:200], wanted,
                           "Restore the file.") from error
    if bad:
        raise InvalidInput(str(index), f"files {repr(sorted(map(str, bad))[:5])[:200]} are absent or outside of it",
                           wanted, "Fetch the missing shards.")
    return mapping
