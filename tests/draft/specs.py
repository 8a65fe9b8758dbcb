"""Small draft specs and random batches for the numeric tests."""

from __future__ import annotations

from dataclasses import replace

import torch

from eyas_contract import DraftSpec, MlaSizes, Rope
from eyas_draft.batches import Batch
from eyas_draft.model import DraftModel
from eyas_draft.states import States
from eyas_draft.store import Sample

SPEC = DraftSpec(kind="llama", num_layers=1, hidden_size=32, intermediate_size=48, num_heads=4, num_kv_heads=2,
                 head_dim=8, target_hidden_size=32, num_aux=3, draft_vocab_size=20, target_vocab_size=50,
                 max_position_embeddings=256, rope=Rope("default", 10000.0), rms_norm_eps=1e-5, hidden_act="silu",
                 fc_norm=False, norm_output=False, own_embedding=False, dtype="float32")
YARN = Rope("yarn", 5e4, (("beta_fast", 32.0), ("beta_slow", 1.0), ("factor", 4.0), ("mscale", 1.0),
                          ("mscale_all_dim", 0.7), ("original_max_position_embeddings", 64)))
MLA = replace(SPEC, kind="mla", mla=MlaSizes(20, 12, 6, 4, 5), num_kv_heads=4, head_dim=10, rope=YARN)
VARIANTS = {"plain": SPEC, "eagle-3.1": replace(SPEC, fc_norm=True, norm_output=True), "two layers":
            replace(SPEC, num_layers=2), "llama3 rope": replace(SPEC, rope=Rope("llama3", 5e4, (
                ("factor", 8.0), ("high_freq_factor", 4.0), ("low_freq_factor", 1.0),
                ("original_max_position_embeddings", 64)))), "mla": MLA}


def random_model(spec: DraftSpec, seed: int = 0, dtype: torch.dtype = torch.float64) -> DraftModel:
    """A draft whose every weight is random, norms included."""
    generator = torch.Generator().manual_seed(seed)
    model = DraftModel(spec, torch.randn(spec.target_vocab_size, spec.hidden_size, generator=generator)).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            scale, shift = (0.2, 0.0) if parameter.dim() == 2 else (0.3, 1.0)
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale + shift)
    return model


def random_samples(spec: DraftSpec, lengths: tuple[int, ...], seed: int = 0,
                   dtype: torch.dtype = torch.float64) -> list[Sample]:
    """Samples with random ids and states; the mask begins a third of the way in, with a gap."""
    g = torch.Generator().manual_seed(seed)
    samples = []
    for number, n in enumerate(lengths):
        mask = torch.arange(n) >= n // 3
        mask[n // 2] = False
        samples.append(Sample(
            f"s{number}", torch.randint(spec.target_vocab_size, (n,), generator=g, dtype=torch.int32), mask,
            *(States(torch.randn(n, layers * spec.target_hidden_size, generator=g, dtype=dtype))
              for layers in (spec.num_aux, 1))))
    return samples


def pack(samples: list[Sample]) -> Batch:
    """One batch on the CPU."""
    return Batch.pack(samples, torch.device("cpu"))
