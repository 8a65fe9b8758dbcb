"""Every stored tensor accounted for, every parameter filled: names, shapes, dtypes, head and embedding."""

from __future__ import annotations

from eyas_contract.engines import sglang
from eyas_contract.engines.checks.case import Case
from eyas_contract.engines.checks.placing import SILENT, Placed
from eyas_contract.engines.findings import Finding
from eyas_contract.engines.loaders import Loader
from eyas_contract.engines.quantised import method, unquantised
from eyas_contract.engines.wanted import head_dim, kv_heads, target_width
from eyas_contract.safetensors_header import TensorInfo

_FLOATS = ("BF16", "F16", "F32")


def check_tensors(case: Case, loader: Loader, placed: Placed) -> list[Finding]:
    """Dropped, refused, doubled, missing, mis-shaped and mistyped tensors."""
    wanted = placed.wanted
    result = _strangers(case, loader, placed)
    if placed.twice:
        result.append(Finding("tensor-twice", "error", case.weights, "; ".join(placed.twice),
                              "one tensor for one parameter", "whichever is read last is served", "Remove one."))
    result += _missing(case, placed)
    explained, findings = _head_dim(case, placed)
    result += findings
    width_finding = _fc_width(case, loader, placed)
    explained |= {"fc.weight"} if width_finding else set()
    wrong = [f"{info.name} {list(info.shape)}, not {list(wanted[name])}" for name, info in placed.found.items()
             if info.shape != wanted[name] and name not in explained and name != "lm_head.weight"
             and not _packed(case, loader, name, info)]
    if wrong:
        result.append(Finding("tensor-shape", "error", case.weights, "; ".join(wrong),
                              "the shapes that config.json describes",
                              "the server fails while loading, or cuts or pads them without a word",
                              "Correct config.json or export again."))
    return result + width_finding + _dtypes(case, loader, placed) + _unsure(case, loader, placed)


def _packed(case: Case, loader: Loader, name: str, info: TensorInfo) -> bool:
    """Whether a weight holds several numbers in one, so that its shape is its method's."""
    return bool(method(case.config)) and info.dtype in ("U8", "I32") and not unquantised(name, loader)


def _unsure(case: Case, loader: Loader, placed: Placed) -> list[Finding]:
    if not placed.unsure:
        return []
    return [Finding("tensor-quantised", "warning", case.weights, f"{len(placed.unsure)}: "
                    f"{', '.join(sorted(placed.unsure)[:8])}",
                    f"parameters that {loader.name} is known to load for quant_method {method(case.config)}",
                    "if the server drops them, the layer computes nonsense without a message",
                    "Compare the served draft with its golden record (eyas-serve probe), or serve it in bfloat16.")]


def _strangers(case: Case, loader: Loader, placed: Placed) -> list[Finding]:
    if not placed.strangers:
        return []
    names = ", ".join(sorted(placed.strangers))
    spelled = f"{'' if loader.engine == 'sglang' else 'layers.N.* or '}midlayer.*, fc, norm, lm_head"
    if loader.unknown == "refused":
        return [Finding("tensor-refused", "error", case.weights, names, f"names that {loader.name} knows: {spelled}",
                        "the server stops while loading", "Rename or remove them: eyas-draft convert --to vllm.")]
    log = "with one warning per name in its log" if loader.unknown == "warned" else "without a word"
    pairs = [f"{n} -> {_rename(n)}" for n in sorted(placed.strangers) if _rename(n) != n]
    remedy = f"Rename them: {'; '.join(pairs)}." if pairs else \
        "Rename them to the accepted names, or switch on the config key that uses them (fc_norm, norm_before_fc)."
    return [Finding("tensor-dropped", "error", case.weights, f"{len(placed.strangers)}: {names}",
                    f"names that {loader.name} accepts: {spelled}",
                    f"the server drops them {log}; what they should fill keeps random values; {SILENT}",
                    f"{remedy} (eyas-draft convert --to sglang writes names that every version accepts.)")]


def _rename(name: str) -> str:
    """The spelling that every SGLang version accepts, where one is evident."""
    plain = name.removeprefix("model.")
    for guess in ("layers.0.", "decoder_layers.0.", "decoder.layers.0.", "layer.0.", "midlayers.0."):
        if plain.startswith(guess):
            return "midlayer." + plain[len(guess):]
    return plain


def _missing(case: Case, placed: Placed) -> list[Finding]:
    special = {"lm_head.weight", "embed_tokens.weight"}
    missing = sorted(set(placed.wanted) - set(placed.found) - placed.covered - special)
    if not missing:
        return []
    spelled = ", ".join(sglang.export_name(name) for name in missing)
    norm = any("norm." in name and not name.startswith("layers.") and name != "norm.weight" for name in missing)
    return [Finding("tensor-missing", "error", case.weights, f"no {spelled}", "every weight of the draft class",
                    f"they keep their uninitialised values; {SILENT}",
                    "Export them" + (", or switch the config key off that asks for the norm." if norm else "."))]


def _head_dim(case: Case, placed: Placed) -> tuple[set[str], list[Finding]]:
    """A head_dim that config.json leaves out or misstates, read off the projections' rows."""
    q = placed.found.get("layers.0.self_attn.q_proj.weight")
    k = placed.found.get("layers.0.self_attn.k_proj.weight")
    heads, kv, dim = case.config["num_attention_heads"], kv_heads(case.config), head_dim(case.config)
    if q is None or k is None or len(q.shape) != 2 or len(k.shape) != 2 or q.shape[0] == heads * dim \
            or q.shape[0] % heads or k.shape[0] != kv * (q.shape[0] // heads):
        return set(), []
    real = q.shape[0] // heads
    written, typed = case.raw.get("head_dim"), case.config.get("head_dim")
    says = f"says {written}" if written is not None else \
        f"leaves head_dim out, and the default of model_type {case.config['model_type']} is {dim}" if typed else \
        f"leaves head_dim out, and the default {case.config['hidden_size']} / {heads} is {dim}"
    of_target = case.target_config.get("head_dim") or case.spec.hidden_size // (
        case.target_config.get("num_attention_heads") or 1)
    same = "equal to the target's: same KV page size" if of_target == real else \
        f"the target's is {of_target}: KV pages of another size"
    return {f"layers.0.self_attn.{x}_proj.weight" for x in "qkvo"}, [Finding(
        "head-dim", "error", "config.json: head_dim",
        f"q_proj has {q.shape[0]} rows = {heads} x {real} and k_proj {k.shape[0]} = {kv} x {real}, so head_dim is "
        f"{real}; config.json {says}", f"head_dim {real} ({same})", "the server builds projections of another size",
        f'Add "head_dim": {real} to config.json.')]


def _fc_width(case: Case, loader: Loader, placed: Placed) -> list[Finding]:
    """`fc` made for another number of states, or for another target's width."""
    fc, width = placed.found.get("fc.weight"), target_width(case.config)
    count = loader.num_aux(case.config)
    if fc is None or len(fc.shape) != 2 or fc.shape[1] == count * width:
        return []
    if fc.shape[0] != case.config["hidden_size"] or fc.shape[1] % width:
        return []
    return [Finding("aux-layer-count", "error", f"{case.weights}: {fc.name}",
                    f"{fc.shape[1]} columns = {fc.shape[1] // width} states of {width}, but config.json makes "
                    f"{loader.name} build it for {count}", f"{count * width} columns, or layer ids for "
                    f"{fc.shape[1] // width} states", "the server fails while loading",
                    "Write as many aux layer ids as the draft was trained on"
                    + (" (SGLang before 0.5.12 takes exactly 3)." if loader.version < (0, 5, 12)
                       and loader.engine == "sglang" else "."))]


def _dtypes(case: Case, loader: Loader, placed: Placed) -> list[Finding]:
    quantised = bool(case.config.get("quantization_config"))
    wrong = [f"{info.name} {info.dtype}" for name, info in placed.found.items()
             if info.dtype not in _FLOATS and (not quantised or unquantised(name, loader))]
    if not wrong:
        return []
    return [Finding("tensor-dtype", "error", case.weights, ", ".join(wrong), f"one of {', '.join(_FLOATS)}",
                    "numbers are cast without their scales: the layer computes nonsense",
                    "Export in bfloat16, or write the quantization_config that these weights belong to.")]
