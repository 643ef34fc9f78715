"""Text files: one text for each line, and a label behind a tab; tokens for Hugging Face models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from linnet.cli.data_files.tables import parse_labels, read_rows
from linnet.cli.terminal import UsageError


def read_texts(path: Path, *, target: str, text: bool = False) -> tuple[list[str], np.ndarray | None]:
    """Read lines ``text<TAB>label``. A file without tabs has no labels.

    A first line such as ``text<TAB>label``, or with the name of the target, is a header.
    ``text`` says that the labels are text, whatever they look like.
    """
    header, rows = read_rows(path, "\t")
    if len(header) > 2:
        raise UsageError(f"{path} has {len(header)} columns. A text file has a text and, behind a tab, a label.")
    is_header = header[0].lower() in ("text", "sentence") or target in header[1:]
    lines = rows if is_header else [header, *rows]
    if not lines:
        raise UsageError(f"{path} has a header but no texts.")
    texts = [line[0] for line in lines]
    empty = [i for i, text in enumerate(texts) if not text.strip()]
    if empty:
        raise UsageError(
            f"{path}, line {empty[0] + 1 + is_header}: the text is missing, as in {len(empty)} lines in all."
        )
    if len(header) == 1:
        return texts, None
    labels = [line[1].strip() for line in lines]
    return texts, np.array(labels) if text else parse_labels(labels)


def tokenize(texts: list[str], tokenizer: str, *, max_length: int) -> dict[str, Any]:
    """Tokens of texts as a dict of tensors, padded to the longest text.

    Args:
        texts: The texts.
        tokenizer: A folder, or a name that transformers knows.
        max_length: Number of tokens after which a text is cut.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise UsageError("Text files need transformers: pip install transformers.") from error
    try:
        made = AutoTokenizer.from_pretrained(tokenizer)
    except Exception as error:  # a hub, a folder or a file may raise anything
        raise UsageError(f"transformers finds no tokenizer at {tokenizer!r}: {error}") from error
    tokens = made(texts, padding=True, truncation=True, max_length=max_length, return_tensors="pt")
    return {name: tokens[name] for name in made.model_input_names if name in tokens}
