"""What `python -m torchtitan.tools.evaluate` does with its flags."""

import argparse
import json
import time

from torchtitan.config.output import Metrics
from torchtitan.config.training import Evaluation
from torchtitan.device import find_device
from torchtitan.errors import ConfigError
from torchtitan.metrics.reporter import make_writers
from torchtitan.strict_json import finite
from torchtitan.tools.evaluation.evaluator import Evaluator, results_table
from torchtitan.tools.evaluation.find_tasks import find_tasks
from torchtitan.tools.evaluation.scoring import scorer_of_model
from torchtitan.tools.generation.open import choose_dtype, open_model

BATCH_TOKENS = 8192
USUAL_LENGTH = 2048  # where the folder does not say what its model was trained on


def evaluate_checkpoint(arguments: argparse.Namespace) -> None:
    for name, least, range_ in (("num_fewshot", 0, "0 or above"), ("limit", 1, "above 0"), ("seq_len", 1, "above 0")):
        given = getattr(arguments, name)
        if given is not None and given < least:
            raise ConfigError(f"--{name.replace('_', '-')} must be {range_}, not {given}.")
    evaluation = Evaluation(tasks=arguments.tasks, num_fewshot=arguments.num_fewshot, limit=arguments.limit)
    tasks = find_tasks(evaluation, name_of=lambda key: f"--{key.replace('_', '-')}")
    device = find_device(0).torch_device
    dtype = choose_dtype(arguments.dtype, device)
    opened = open_model(arguments.checkpoint, device, dtype, arguments.tokenizer_path, arguments.ema)
    longest = arguments.seq_len or opened.seq_len or USUAL_LENGTH
    scorer = scorer_of_model(opened.model, longest, BATCH_TOKENS, str(opened.folder))
    evaluator = Evaluator(tasks, opened.tokenizer, scorer)
    started = time.perf_counter()
    scores = evaluator.scores()
    metrics = evaluator.metrics(scores)
    seconds = time.perf_counter() - started
    print(f"{opened.folder}, {opened.weights}, {str(dtype)[6:]}, {seconds:.1f} s\n{results_table(metrics)}")
    if arguments.out:
        lines = (json.dumps(finite(detail)) + "\n" for detail in evaluator.details(scores))
        arguments.out.write_text("".join(lines), encoding="utf-8")
    if arguments.dump_folder:
        where = "ema/" if arguments.ema else ""
        values = {f"{where}{task}/{name}": value for task, own in metrics.items() for name, value in own.items()}
        for writer in make_writers(Metrics(enable_tensorboard=True), arguments.dump_folder, 0, None):
            writer.write(opened.step, finite(values))
            writer.close()
