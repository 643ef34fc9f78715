"""Text files: one text for each line, with a label behind a tab; tokens for Hugging Face models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from linnet.cli.data_files.tables import rows_of, whole_or_text
from linnet.cli.terminal import UsageError

TEXT_NAMES = ("text", "sentence")
"""What the first column of a header may be called."""


def read_texts(path: Path, *, target: str, text: bool = False) -> tuple[list[str], np.ndarray | None]:
    """Texts and labels of a file of lines ``text<TAB>label``; without tabs there are no labels.

    A first line such as ``text<TAB>label``, or with the target's name in it, is a header.
    ``text`` says that labels are text whatever they look like.
    """
    header, rows = rows_of(path, "\t")
    if len(header) > 2:
        raise UsageError(f"{path} has {len(header)} columns; a text file has a text and, behind a tab, its label.")
    is_header = header[0].lower() in TEXT_NAMES or target in header[1:]
    lines = rows if is_header else [header, *rows]
    if not lines:
        raise UsageError(f"{path} has a header and no texts.")
    texts = [line[0] for line in lines]
    empty = [i for i, text in enumerate(texts) if not text.strip()]
    if empty:
        raise UsageError(f"{path}, line {empty[0] + 1 + is_header}: no text, as in {len(empty)} lines in all.")
    if len(header) == 1:
        return texts, None
    labels = [line[1].strip() for line in lines]
    return texts, np.array(labels) if text else whole_or_text(labels)


def tokenized(texts: list[str], tokenizer: str, *, max_length: int) -> dict[str, Any]:
    """Tokens of texts as a dict of tensors, padded to the longest.

    Args:
        texts: The texts.
        tokenizer: A folder or a name that transformers knows.
        max_length: Tokens after which a text is cut.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise UsageError("Text files need transformers: pip install transformers.") from error
    try:
        made = AutoTokenizer.from_pretrained(tokenizer)
    except Exception as error:  # whatever a hub, a folder or a file may raise
        raise UsageError(f"transformers finds no tokenizer at {tokenizer!r}: {error}") from error
    tokens = made(texts, padding=True, truncation=True, max_length=max_length, return_tensors="pt")
    return {name: tokens[name] for name in made.model_input_names if name in tokens}
