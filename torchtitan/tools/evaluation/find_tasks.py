"""From the entries of `evaluation.tasks` to tasks."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from torchtitan.config.training import Evaluation, Training, Validation
from torchtitan.data.datasets import VALIDATION, documents_of, held_out_documents
from torchtitan.data.sources import Document
from torchtitan.errors import ConfigError, DataError, nearest
from torchtitan.files import PathError, local_path
from torchtitan.tools.evaluation.embedded import EMBEDDED, make
from torchtitan.tools.evaluation.formats import read_examples
from torchtitan.tools.evaluation.harness import HARNESS, Harness
from torchtitan.tools.evaluation.tasks import Choice, LastWords, MultipleChoice, Task, Text

HELD_OUT = "held_out"
TEXT = "text:"
MOST_DOCUMENTS = 1000  # documents read of a text without a limit, since data sets can be endless


def find_tasks(
    evaluation: Evaluation,
    validation: Validation | None = None,
    training: Training | None = None,
    name_of: Callable[[str], str] = "evaluation.{}".format,
) -> list[Task]:
    """The tasks that `evaluation` names. With a process group, if one is lm_eval's. Raises a UserError if there is no
    such task, or its file cannot be used.

    Args:
        validation, training: of the run, whose held-out text can be evaluated; None without a run.
        name_of: how messages call a key.
    """
    key = name_of("tasks")
    tasks: list[Task] = []
    if of_harness := [entry for entry in evaluation.tasks if entry.startswith(HARNESS)]:
        tasks.append(Harness(of_harness, evaluation, name_of))
    for entry in evaluation.tasks:
        if entry == HELD_OUT:
            if validation is None or training is None:
                raise ConfigError(f"{key}: {HELD_OUT} is only available in a training run; use {TEXT}PATH instead.")
            if not (validation.enabled or validation.dataset or validation.dataset_path):
                raise ConfigError(
                    f"{key}: {HELD_OUT} needs text that is not trained on: set validation.enabled = true, or "
                    "validation.dataset_path."
                )
            named = held_out_documents(validation, training)
            names = short_names([name for name, _ in named])
            tasks += [
                _text(HELD_OUT if len(named) == 1 else f"{HELD_OUT}/{name}", documents, evaluation.limit, key)
                for name, (_, documents) in zip(names, named, strict=True)
            ]
        elif entry.startswith(TEXT):
            path = entry.removeprefix(TEXT)
            column = "text" if validation is None else validation.text_column
            plain = (name for name in (Path(path).stem, Path(path).parent.name) if not {*name} & {*"*?["})
            name = next(plain, "") or "text"
            tasks.append(_text(name, documents_of(path, column, key, VALIDATION), evaluation.limit, key))
        elif entry not in of_harness:
            tasks.append(_examples(entry, evaluation, name_of))
    names = [task.name for task in tasks]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"{key}: two tasks are named {twice}; rename one of the files, or remove it.")
    return tasks


def short_names(names: Sequence[str]) -> list[str]:
    """The shortest ends of paths that differ from each other, for metrics; names that are no paths stay."""
    paths = [Path(name).parts if Path(name).exists() else (name,) for name in names]

    def end_of(path: tuple[str, ...]) -> str:
        others = list(paths)
        others.remove(path)
        lengths = range(1, len(path) + 1)
        return "/".join(next((path[-n:] for n in lengths if path[-n:] not in [other[-n:] for other in others]), path))

    return list(map(end_of, paths))


def _examples(entry: str, evaluation: Evaluation, name_of: Callable[[str], str]) -> Task:
    key, shots = name_of("tasks"), evaluation.num_fewshot or 0
    examples: list[Any]
    if entry in EMBEDDED:
        examples = make(entry)
    else:
        try:
            path = local_path(entry)
        except PathError as error:
            raise ConfigError(f"{key}: {error}") from None
        if not path.exists():
            known = [*EMBEDDED, HELD_OUT]
            raise ConfigError(
                f"{key}: {entry!r} is neither a task{nearest(entry, known)} nor a file; known: {', '.join(known)}, "
                f"{TEXT}PATH, {HARNESS}TASK, and JSONL files in the format of HellaSwag, ARC, PIQA or LAMBADA."
            )
        examples = read_examples(path, key)
    if len(examples) <= shots:
        raise ConfigError(
            f"{name_of('num_fewshot')} = {shots} needs {shots + 1} examples, including the one to solve, but "
            f"{entry} has {len(examples)}; lower it."
        )
    type_: Any = MultipleChoice if isinstance(examples[0], Choice) else LastWords
    task: Task = type_(Path(entry).stem, examples, shots, evaluation.limit)
    return task


def _text(name: str, documents: Iterable[Document], limit: int | None, key: str) -> Text:
    texts = ((document.id, document.text) for document in documents if document.text)
    used = list(itertools.islice(texts, limit or MOST_DOCUMENTS))
    if not used:
        raise DataError(f"{key}: {name} has no text.")
    return Text(name, used)
