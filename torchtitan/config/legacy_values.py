"""Values of current keys in files of other torchtitan versions; `legacy_keys.py` has their keys.

Every file is looked through for these. The keys, and the rules on several values, are loaded only if a file or a flag
has a key or a value that is not current.
"""

import json
from collections.abc import Mapping
from typing import Any

Values = dict[str, Any]  # "section.key" -> value

# Tables of several months, with the keys of [float8] and [mx] of today.
LINEAR_TABLES = {
    "float8": "quantize.linear.float8 quantize.dense.float8 quantize.linear.fp8 quantize.float8.dense",
    "mx": "quantize.linear.mx quantize.dense.mx quantize.mx.dense",
}
EXPERT_TABLES = {
    "float8": "quantize.grouped_mm.float8 quantize.moe.float8 quantize.moe.fp8 quantize.float8.moe",
    "mx": "quantize.grouped_mm.mx quantize.moe.mx quantize.mx.moe",
}

DOCUMENT_MASK = {"training.document_mask": True}
# Legacy values of current keys; for a list, of its entries. None drops the entry, or leaves the key at its default.
LEGACY_VALUES: Mapping[str, Mapping[Any, tuple[Any, Values]]] = {
    "model.name": {"llama": ("llama2", {})},
    "model.flavor": {
        f"{size}_{mask}": (size, DOCUMENT_MASK)
        for size in ("debugmodel", "8B", "70B", "405B")
        for mask in ("flex_attn", "varlen_attn", "flex", "varlen")
    },
    "model.converters": {
        table: (name, {})
        for tables in (LINEAR_TABLES, EXPERT_TABLES)
        for name, names in tables.items()
        for table in names.split()
    },
    "mx.recipe_name": {
        "mxfp8_cublas": ("mxfp8", {"mx.scale_calculation_mode": "floor"}),
        "mxfp8_cublas_rceil": ("mxfp8", {"mx.scale_calculation_mode": "rceil"}),
        "mxfp8_emulated": ("mxfp8", {"mx.scale_calculation_mode": "floor", "mx.emulate": True}),
    },
    "training.dataset": dict.fromkeys(("c4_mini", "c4_test"), ("c4", {})),
    "validation.dataset": {"c4_test": ("c4_validation", {})},
    "training.seed": {"none": (0, {}), "None": (0, {})},
    "parallelism.pipeline_parallel_schedule": {"interleaved_1f1b": ("Interleaved1F1B", {})},
    "checkpoint.folder": {"": (None, {"checkpoint.enable_checkpoint": False})},
    "checkpoint.exclude_from_loading": {"lr_scheduler": (None, {})},
}

WITH_RULES: Values = {"model.name": "qwen3", "optimizer.early_step_in_backward": True}
"""Current values that a rule of `legacy_keys.RULES` is about though no legacy key or value is beside them."""


def spelled(value: Any) -> str:
    """As in a message: without quotation marks, unless it would be empty."""
    return value if isinstance(value, str) and value else json.dumps(value)


def translate_value(key: str, value: Any) -> tuple[Any, Values, list[str]]:
    """For a value of a current key: the current value, other keys that it sets, and the legacy entries in it."""
    table = LEGACY_VALUES.get(key, {})
    entries = value if isinstance(value, list) else [value]
    legacy = [str(entry) for entry in entries if str(entry) in table]
    if not legacy:
        return value, {}, []
    new = [table.get(str(entry), (entry, {}))[0] for entry in entries]
    new = list(dict.fromkeys(entry for entry in new if entry is not None))
    others = {name: other for entry in legacy for name, other in table[entry][1].items()}
    return (new if isinstance(value, list) else next(iter(new), None)), others, legacy


def notice_of_value(key: str, entry: str) -> str:
    """What happened to a legacy value."""
    new, others = LEGACY_VALUES[key][entry]
    now = {**({key: new} if new is not None else {}), **others}
    return f"{key} = {spelled(entry)} is now {', '.join(f'{k} = {spelled(v)}' for k, v in now.items()) or 'ignored'}"
