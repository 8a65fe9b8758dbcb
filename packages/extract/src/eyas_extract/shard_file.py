"""A shard that an engine fills: laid out in its final size, written by the plug-in, then hashed and synced here."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eyas_contract import CaptureSpec, SampleRecord, TensorRecord
from eyas_contract.safetensors_header import read_header
from eyas_extract.check import read_tensor
from eyas_extract.digest import record_of
from eyas_extract.disk import room_for
from eyas_extract.dtypes import TORCH_DTYPES
from eyas_extract.mask import Sample
from eyas_extract.protocol import Mark, rows_file
from eyas_extract.store import header_bytes, write_safetensors

NUMBERS = itertools.count()


class ShardFile:
    """One attempt at a shard's file.

    Args:
        folder: of the store.
        capture: its tensors.
        samples: in packed order.
        metadata: of the header.

    Raises:
        EyasError: no room for it. The file takes its whole space at once, so that the engine never meets a full disk.
    """

    def __init__(self, folder: Path, capture: CaptureSpec, samples: Sequence[Sample], metadata: dict[str, str]) -> None:
        self.capture, self.samples, self.metadata = capture, list(samples), metadata
        self.path = folder / f".shard-{os.getpid()}-{next(NUMBERS)}.safetensors.tmp"
        self.lengths = [len(s.input_ids) for s in samples]
        self.bounds = [0, *accumulate(self.lengths)]
        small = small_tensors(samples)
        dims = {"T": self.bounds[-1], "N+1": len(samples) + 1, "K": len(capture.aux_layer_ids),
                "K*H": capture.aux_width, "H": capture.hidden_size}
        entries = []
        for spec in capture.tensors:
            shape = tuple(dims[d] if d in dims else int(d) for d in spec.dims)
            size = TORCH_DTYPES[spec.dtype].itemsize * torch.Size(shape).numel()
            entries.append((spec.name, spec.dtype, shape, size))
        header = header_bytes(entries, metadata)
        with room_for(self.path), self.path.open("wb", buffering=0) as sink:
            try:
                os.posix_fallocate(sink.fileno(), 0, len(header) + sum(size for *_, size in entries))
                sink.write(header)
                offset = len(header)
                for name, _, _, size in entries:
                    if name in small:
                        os.pwrite(sink.fileno(), small[name].tobytes(), offset)
                    offset += size
            except OSError:
                self.remove()
                raise

    def marks(self, attempt: int = 0) -> list[Mark]:
        """Where each sample's rows belong."""
        path = str(self.path.resolve())
        return [Mark(path, first, rows, attempt) for first, rows in zip(self.bounds, self.lengths, strict=False)]

    def finish(self, bad: dict[int, str]) -> tuple[tuple[TensorRecord, ...], list[SampleRecord]]:
        """Hash and sync the filled file; samples in `bad` (by number) are taken out of it first.

        Returns:
            The tensors' records and the samples that are in it; none where all were bad.
        """
        good = [i for i in range(len(self.samples)) if i not in bad]
        kept = [SampleRecord(self.samples[i].id, self.lengths[i], self.samples[i].trained) for i in good]
        with room_for(self.path):
            if bad:
                return self._without(good), kept
            with self.path.open("rb", buffering=0) as source:
                os.fsync(source.fileno())
                records = [record_of(source.fileno(), info) for info in read_header(self.path).tensors.values()]
        return tuple(records), kept

    def _without(self, good: Sequence[int]) -> tuple[TensorRecord, ...]:
        """Write the file anew with these samples only."""
        header = read_header(self.path)
        tensors = {name: read_tensor(header.tensors[name]) for name in (s.name for s in self.capture.tensors)}
        rows = torch.cat([torch.arange(self.bounds[i], self.bounds[i + 1]) for i in good] or [torch.empty(0).long()])
        for spec in self.capture.tensors:
            if spec.dims[0] == "T":
                whole = tensors[spec.name]
                tensors[spec.name] = (whole[rows] if whole.element_size() > 1 else
                                      whole.view(torch.uint8)[rows].view(whole.dtype))
        tensors["sample_offsets"] = torch.tensor([0, *accumulate(self.lengths[i] for i in good)])
        return write_safetensors(self.path, tensors, self.metadata)[0]

    def remove(self) -> None:
        """Delete the file and its report."""
        self.path.unlink(missing_ok=True)
        rows_file(self.path).unlink(missing_ok=True)


def small_tensors(samples: Sequence[Sample]) -> dict[str, np.ndarray[Any, Any]]:
    """A shard's tensors without the states."""
    ids, masks = b"".join(s.input_ids.tobytes() for s in samples), b"".join(s.loss_mask for s in samples)
    return {"input_ids": np.frombuffer(ids, np.int32), "loss_mask": np.frombuffer(masks, np.uint8),
            "sample_offsets": np.array([0, *accumulate(len(s.input_ids) for s in samples)], np.int64)}
