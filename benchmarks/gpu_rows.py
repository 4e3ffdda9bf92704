"""The rows of gpu.py's table: models and recipes."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal


@dataclass(frozen=True)
class Shape:
    """A model, and how much of it runs in a micro-batch.

    Attributes:
        batch: sequences.
        ranks: of the FSDP group whose first rank it is; the others are simulated, and all layers are there.
        reshard: `parallelism.fsdp_reshard_after_forward`.
    """

    family: str
    flavor: str
    batch: int = 1
    ranks: int = 1
    reshard: Literal["default", "always", "never"] = "never"


SPARSE, MANY_ROWS = "30B-A3B", "30B-A3B with 4096 rows"
OF_EIGHT, RESHARDED = "8B as 1 of 8", "8B as 1 of 8 resharded"
MODELS = {
    "8B": Shape("llama3", "8B"),
    "3B": Shape("llama3.2", "3B"),
    "1B": Shape("llama3.2", "1B"),
    "qwen3-8B": Shape("qwen3", "8B"),
    # An expert has 8 of 128 of the tokens: 512 rows of a sequence of 8,192, and 4,096 of eight of them.
    SPARSE: Shape("qwen3_moe", "30B-A3B"),
    MANY_ROWS: Shape("qwen3_moe", "30B-A3B", batch=8),
    # Of an H100's 80 GB, weights that stay gathered may take too much.
    OF_EIGHT: Shape("llama3", "8B", ranks=8),
    RESHARDED: Shape("llama3", "8B", ranks=8, reshard="always"),
}
WITH_EVERY_RECIPE = ("8B", "3B", "1B", "qwen3-8B", SPARSE)


@dataclass(frozen=True)
class Recipe:
    """A row, except for the model.

    Attributes:
        converter: name, or "".
        keys: of the converter's section. `output` stays in bf16 (docs/performance.md).
        peer: it is a row of the trainer that ours is compared with.
        micro_batches: of a step, whose gradients are summed.
        sustained: seconds for which steps then go on without a pause.
    """

    name: str
    compile: bool = True
    converter: str = ""
    keys: dict[str, Any] = field(default_factory=dict)
    peer: bool = False
    micro_batches: int = 1
    sustained: float = 0.0


def float8(recipe_name: str, *filters: str) -> dict[str, Any]:
    return {"recipe_name": recipe_name, "filter_fqns": ["output", *filters]}


PEER = "torchtitan 0.1.0"
BASE = Recipe("bf16 compiled")
TENSORWISE = Recipe("float8 tensorwise", converter="float8", keys=float8("tensorwise"))
FILTERED = Recipe(
    "float8 rowwise, auto_filter_small_kn", converter="float8", keys=float8("rowwise", "auto_filter_small_kn")
)
ROWWISE = Recipe("float8 rowwise", converter="float8", keys=float8("rowwise"))
INT8 = Recipe("int8 rowwise", converter="int8")
INT8_ONCE = Recipe("int8 rowwise, weights once a step", converter="int8", keys={"enable_fsdp_int8_all_gather": True})
EAGER = Recipe("bf16 eager", compile=False)
RECIPES = (BASE, TENSORWISE, FILTERED, ROWWISE, INT8_ONCE, INT8, EAGER)
# Of some models alone.
GATHER = {"enable_fsdp_float8_all_gather": True, "precompute_float8_dynamic_scale_for_fsdp": True}
GATHERED = Recipe("float8 tensorwise, gathered", converter="float8", keys=float8("tensorwise") | GATHER)
DELAYED = Recipe("float8 delayed", converter="float8", keys=float8("delayed"))
BASE_SUMMED = replace(BASE, name="bf16 compiled, 4 micro-batches", micro_batches=4)
TENSORWISE_SUMMED = replace(TENSORWISE, name="float8 tensorwise, 4 micro-batches", micro_batches=4)
SUSTAINED = replace(TENSORWISE, name="float8 tensorwise, 60 s", sustained=60.0)
EXPERTS = Recipe("float8 rowwise, experts alone", converter="float8", keys=float8("rowwise", "attention"))
EXPERTS_GW_HP = Recipe(
    "float8 rowwise_with_gw_hp, experts alone", converter="float8", keys=float8("rowwise_with_gw_hp", "attention")
)
# The published batch: 128 sequences on 8 GPUs.
GATHERED_16 = replace(GATHERED, name=f"{GATHERED.name}, 16 micro-batches, 60 s", micro_batches=16, sustained=60.0)
BASE_16 = replace(BASE, name=f"{BASE.name}, 16 micro-batches, 60 s", micro_batches=16, sustained=60.0)
MORE = (
    *(GATHERED, DELAYED, BASE_SUMMED, TENSORWISE_SUMMED, SUSTAINED, EXPERTS, EXPERTS_GW_HP),
    *(GATHERED_16, BASE_16),
)
CACHED = Recipe("bf16 compiled, cached")  # of the first model, last and in a new process
PEERS = (
    Recipe(f"{PEER}, bf16 compiled", peer=True),
    Recipe(f"{PEER}, float8 tensorwise", converter="float8", keys=float8("tensorwise"), peer=True),
)
# What a user starts: a shipped file that fits on one GPU, with text and a tokenizer that need no download.
USER = (
    "llama3.2_1b.toml",
    *("--training.steps=20", "--lr_scheduler.warmup_steps=2", "--training.dataset=python_stdlib"),
    *("--training.global_batch_size=4", "--training.compile", "--metrics.log_freq=5"),
    *("--model.tokenizer_path=none", "--checkpoint.enable_checkpoint=false", "--metrics.enable_tensorboard=false"),
)
SMOKE_USER = ("debug_model.toml", "--training.steps=20", "--training.local_batch_size=2", "--metrics.log_freq=5")
USER_ROW = "train.py"  # its name among the rows
# What is not known yet comes first, then what the aims are about (docs/performance.md); then every other combination.
# The peer has no tied embeddings, so only one model is the same there.
FIRST = (
    *(("8B", recipe) for recipe in (BASE, TENSORWISE, GATHERED, DELAYED, ROWWISE, BASE_SUMMED, TENSORWISE_SUMMED)),
    ("8B", SUSTAINED),
    *((model, recipe) for model in (SPARSE, MANY_ROWS) for recipe in (BASE, EXPERTS, EXPERTS_GW_HP)),
    *(("1B", BASE), ("1B", INT8_ONCE), ("1B", TENSORWISE), ("3B", BASE), ("3B", TENSORWISE), ("8B", FILTERED)),
    *(("8B", PEERS[0]), ("8B", PEERS[1]), ("8B", INT8_ONCE), ("8B", EAGER)),
    *((OF_EIGHT, recipe) for recipe in (GATHERED_16, BASE_16, GATHERED, BASE)),
    *((RESHARDED, recipe) for recipe in (GATHERED_16, BASE_16)),
)


@dataclass(frozen=True)
class Row:
    """One row of the table to be measured.

    Attributes:
        traced: whether to profile one more step, which takes some seconds.
        layers: None: as many as fit.
    """

    model: str
    recipe: Recipe
    traced: bool = True
    layers: int | None = None

    @property
    def process(self) -> str:
        """Rows in a row with the same one can share a process."""
        if self.recipe.peer:
            return "peer"
        ranks = MODELS[self.model].ranks
        return f"1 of {ranks}" if ranks > 1 else self.recipe.name if self.recipe.name == CACHED.name else ""

    def __str__(self) -> str:
        return f"{self.model}, {self.recipe.name}"


def rows_by_worth(models: Sequence[str], names: Sequence[str], smoke: bool, compiled: bool = True) -> list[Row]:
    """The rows to measure, in order.

    Args:
        models: to measure.
        names: of recipes, without commas; empty: all.
        smoke: what takes a minute takes seconds, and nothing runs twice to see a cache.
        compiled: otherwise nothing is.
    """
    with_all = [model for model in models if model in WITH_EVERY_RECIPE]
    everything = [*FIRST, *((model, recipe) for model in with_all for recipe in RECIPES)]
    everything += [(model, CACHED) for model in with_all[:1] if not smoke]
    return [
        Row(
            model,
            replace(recipe, compile=recipe.compile and compiled, sustained=recipe.sustained / (30 if smoke else 1)),
            (recipe is BASE or model in (models[0], SPARSE, MANY_ROWS))
            and recipe.micro_batches == 1
            and not recipe.sustained,
        )
        for number, (model, recipe) in enumerate(everything)
        if model in models
        and (not names or recipe.name.replace(",", "") in names)
        and (model, recipe) not in everything[:number]
        and (model, recipe) != (SPARSE, FILTERED)  # which finds no layer large enough
    ]
