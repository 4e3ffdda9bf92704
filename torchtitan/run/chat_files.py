"""What a model of conversations needs beside its tokenizer: the template, the tokens to stop at, and defaults."""

import json
from pathlib import Path

from torchtitan.config import JobConfig
from torchtitan.data.conversations import FILE, chat_for
from torchtitan.data.tokenizer import GENERATION, json_beside, load_tokenizer
from torchtitan.errors import DataError


def add_chat_files(config: JobConfig, folder: Path) -> None:
    """Adds them to `folder`, a copy of the run's tokenizer, from where exports and commands take them; for the last
    stage that trains on conversations."""
    stages = [config.changed(training=entry.sections.get("training", {})) for entry in config.stage.entries]
    chats = [stage.training for stage in stages or [config] if stage.training.train_on]
    if not chats:
        return
    training = chats[-1]
    tokenizer = load_tokenizer(config.model.tokenizer_path, training.add_bos, training.add_eos)
    chat = chat_for(tokenizer, training)
    try:
        template = chat.template
    except DataError:  # prompts and completions are texts, and need none
        return
    (folder / FILE).write_text(template, encoding="utf-8")
    stops = [tokenizer.eos_id, *sorted((tokenizer.stop_ids | chat.ends) - {tokenizer.eos_id})]
    defaults = {**json_beside(tokenizer.file, GENERATION), "eos_token_id": stops, "torchtitan_chat": True}
    (folder / GENERATION).write_text(json.dumps(defaults, indent=2))
