"""safetensors dtype names and torch's dtypes."""

from __future__ import annotations

import torch

STORE_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn}
TORCH_DTYPES = {**STORE_DTYPES, "I32": torch.int32, "I64": torch.int64, "U8": torch.uint8}
NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
