"""Task files in the common formats, with text of Python's standard library: a debug model finds none of it strange."""

import json
from pathlib import Path
from textwrap import dedent
from typing import Any

TEXT = "the import return class self value name object string list module file path error key data type code"
WORDS = TEXT.split()


def sentence(start: int, length: int) -> str:
    """Words that repeat with a period of 18; another text for each start."""
    return " ".join(WORDS[(start * 5 + place * 7) % len(WORDS)] for place in range(length))


def hellaswag(number: int) -> dict[str, Any]:
    return {
        "activity_label": f"Writing {WORDS[number % 18]}",
        "ctx_a": f"A person [header] opens the {sentence(number, 9)} [title] then.",
        "ctx_b": f"the {WORDS[(number + 3) % 18]}",
        "endings": [f"[step] {sentence(number + ending, 3 + 2 * ending)} [substeps] é." for ending in range(4)],
        "label": str(number % 4),
    }


def arc(number: int) -> dict[str, Any]:
    texts = [sentence(number + choice, 1 + choice) for choice in range(3 + number % 3)]
    letters = [str(place + 1) if number % 4 == 0 else "ABCDE"[place] for place in range(len(texts))]
    question = f"What is {sentence(number, 6)}?"
    if number % 2:  # as the original files have it
        listed = [{"text": text, "label": letter} for text, letter in zip(texts, letters, strict=True)]
        return {"question": {"stem": question, "choices": listed}, "answerKey": letters[number % len(letters)]}
    choices = {"text": texts, "label": letters}
    return {"question": question, "choices": choices, "answerKey": letters[number % len(letters)]}


def piqa(number: int) -> dict[str, Any]:
    return {
        "goal": f"To {sentence(number, 5)}",
        "sol1": sentence(number + 1, 4),
        "sol2": sentence(number + 2, 6),
        "label": number % 2,
    }


def lambada(number: int) -> dict[str, Any]:
    return {"text": sentence(number, 12)}


KINDS = {"hellaswag": hellaswag, "arc": arc, "piqa": piqa, "lambada": lambada}


def write(folder: Path, task: str, examples: int) -> Path:
    """Writes `folder`/KIND.jsonl."""
    path = folder / f"{task}.jsonl"
    path.write_text("".join(json.dumps(KINDS[task](number)) + "\n" for number in range(examples)), encoding="utf-8")
    return path


LM_EVAL = {
    "choose": """
        output_type: multiple_choice
        doc_to_text: "{{question}}"
        doc_to_choice: "{{choices}}"
        doc_to_target: "{{gold}}"
        num_fewshot: 2
        fewshot_split: validation
        metric_list:
          - {metric: acc, aggregation: mean, higher_is_better: true}
          - {metric: acc_norm, aggregation: mean, higher_is_better: true}""",
    "last_word": """
        output_type: loglikelihood
        doc_to_text: "{{question}}"
        doc_to_target: " {{next}}"
        metric_list:
          - {metric: acc, aggregation: mean, higher_is_better: true}
          - {metric: perplexity, aggregation: perplexity, higher_is_better: false}""",
    "whole_text": """
        output_type: loglikelihood_rolling
        doc_to_text: ""
        doc_to_target: "{{text}}"
        metric_list:
          - {metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}
          - {metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}""",
    "continue": """
        output_type: generate_until
        doc_to_text: "{{question}}"
        doc_to_target: "{{next}}"
        generation_kwargs: {until: [" the", "\\n\\n"], max_gen_toks: 12}
        filter_list:
          - name: first-word
            filter:
              - {function: regex, regex_pattern: "(\\\\w+)"}
              - {function: take_first}
        metric_list:
          - {metric: exact_match, aggregation: mean, higher_is_better: true}""",
}
"""Task files of lm-evaluation-harness, one for each type of its requests."""


def write_lm_eval(folder: Path, examples: int) -> list[str]:
    """Writes lm_eval's task files, with their data, into `folder`, which `evaluation.tasks` then names as here."""
    lines: list[dict[str, Any]] = []
    for number in range(examples):
        words = sentence(number, 40).split()
        choices = [" ".join(words[start : start + 1 + start % 3]) for start in range(5, 9)]
        choices = choices[-(number % 4) :] + choices[: -(number % 4)]
        text = f"{' '.join(words)}\n" * (8 * (number % 4) + 4)
        lines.append({"question": " ".join(words[:5]), "choices": choices, "next": words[5], "text": text})
        lines[-1]["gold"] = choices.index(next(choice for choice in choices if choice.startswith(words[5])))
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, text in LM_EVAL.items():
        where = f"dataset_path: json\ndataset_kwargs: {{data_files: {{validation: {folder}/data.jsonl}}}}\n"
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{where}validation_split: validation{dedent(text)}\n")
    (folder / "both.yaml").write_text(
        "group: both\ntask: [choose, last_word]\naggregate_metric_list: [{metric: acc, weight_by_size: true}]\n"
    )
    return [f"lm_eval:{folder}/{name}" for name in ("both", "whole_text", "continue")]
