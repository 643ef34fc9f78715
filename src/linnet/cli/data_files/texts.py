"""Texts: one text for each line, and a label behind a tab; or a column of a table; tokens for Hugging Face models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from linnet._common import listing
from linnet.cli.data_files.tables import NUMBER, Table, parse_labels, read_rows
from linnet.cli.model_source import quiet_transformers, say_missing
from linnet.cli.terminal import UsageError

TEXT_NAMES = {
    "text",
    "sentence",
    "review",
    "comment",
    "document",
    "content",
    "body",
    "tweet",
    "title",
    "question",
    "message",
    "input",
    "text_a",
}
"""Names of the column of texts in a first line."""

LABEL_NAMES = {"label", "labels", "class", "category", "sentiment", "target", "y", "rating"}
"""Names of the column of labels in a first line."""

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.txt",
    "vocab.json",
    "spiece.model",
    "tokenizer.model",
    "sentencepiece.bpe.model",
)
"""Files of which a folder with a tokenizer has at least one."""

REMEDY = "Save the tokenizer of the model into the folder of the model, with tokenizer.save_pretrained(FOLDER)."

LONGEST_NAME = 40
"""Number of characters above which the beginning of a first line is a text, and no name of a column."""


def read_texts(path: Path, *, target: str, text: bool = False) -> tuple[list[str], np.ndarray | None]:
    """Read lines ``text<TAB>label``. A file without tabs has no labels.

    A first line such as ``text<TAB>label``, or with the name of the target, is a header. A first line that is neither a
    header nor an example for certain raises. ``text`` says that the labels are text, whatever they look like.
    """
    header, rows = read_rows(path, "\t")
    if len(header) > 2:
        raise UsageError(
            f"{path} has {len(header)} columns. A text file has a text and, behind a tab, a label. If the first line "
            "names the columns, name that of the texts with --columns and that of the labels with --target."
        )
    is_header = _is_header(path, header, target)
    if not is_header:
        _check_first_line(path, header, rows)
    lines = rows if is_header else [header, *rows]
    if not lines:
        raise UsageError(f"{path} has a header but no texts.")
    texts = [line[0] for line in lines]
    check_texts(path, texts, first=1 + is_header)
    if len(header) == 1:
        return texts, None
    labels = [line[1].strip() for line in lines]
    return texts, np.array(labels) if text else parse_labels(labels)


def _is_header(path: Path, header: Sequence[str], target: str) -> bool:
    """Whether a first line has names of columns."""
    first, *second = (name.lower() for name in header)
    if second and first in LABEL_NAMES and second[0] in TEXT_NAMES:
        raise UsageError(
            f"{path} has the label before the text. Put the text first, or name the columns: --target {header[0]} "
            f"--columns {header[1]}."
        )
    known = first in TEXT_NAMES and (not second or second[0] in LABEL_NAMES)
    return known or first in ("text", "sentence") or target in header[1:]


def _check_first_line(path: Path, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Raise where the label of the first line may be the name of a column."""
    if len(header) < 2 or len(rows) < 3 or len(header[0]) > LONGEST_NAME:
        return
    label, counts = header[1].strip(), Counter(row[1].strip() for row in rows)
    numbers = all(NUMBER.fullmatch(other) for other in counts)
    alone = label not in counts and min(counts.values()) > 1
    if bool(NUMBER.fullmatch(label)) if numbers else not alone:
        return
    why = "all other labels are numbers" if numbers else "every other label occurs more than once"
    raise UsageError(
        f"{path}, line 1: is {listing(header)} a text with its label, or the names of the columns? No other line has "
        f"the label {label!r}, and {why}. If the line has names, leave the line out, or write text<TAB>label in its "
        "place. If the line is an example, put a line text<TAB>label above."
    )


def check_texts(path: Path, texts: Sequence[str], *, first: int) -> None:
    """Raise where a text is empty; ``first`` is the line of the first text."""
    empty = [i for i, text in enumerate(texts) if not text.strip()]
    if empty:
        raise UsageError(f"{path}, line {empty[0] + first}: the text is missing, as in {len(empty)} lines in all.")


def find_text_column(table: Table, names: Sequence[str], *, known: bool) -> str | None:
    """The name of the column of texts, if a table has one among the inputs ``names``; None for a table of numbers.

    Several columns raise if one of them is text. ``known`` says that a single column is text, as in the training data,
    although all its cells may be numbers.
    """
    found = [name for name in names if _is_text(table, name)]
    if len(names) == 1:
        return names[0] if found or known else None
    if not found:
        return None
    raise UsageError(
        f"{table.path} has the columns {listing(names, limit=12)}, of which {listing(found, limit=12)} "
        f"{'is' if len(found) == 1 else 'are'} text. A model of texts reads one column. Name this column with "
        f"--columns, such as --columns {found[0]}, or leave the other columns out of the file."
    )


def _is_text(table: Table, name: str) -> bool:
    """Whether a column has words. A file that says which columns are text is believed."""
    cells = table.columns[name].tolist()
    if not all(isinstance(cell, str) for cell in cells):
        return False
    return table.typed or any(cell.strip() and not NUMBER.fullmatch(cell.strip()) for cell in cells)


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
    folder = Path(tokenizer)
    if folder.is_dir() and not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise UsageError(f"The folder {tokenizer} has no tokenizer: none of {', '.join(TOKENIZER_FILES)}. {REMEDY}")
    try:
        with quiet_transformers():
            made = AutoTokenizer.from_pretrained(tokenizer)
    except Exception as error:  # a hub, a folder or a file may raise anything
        raise UsageError(
            f"{say_missing(tokenizer)}transformers finds no tokenizer at {tokenizer!r}: {error}"
        ) from error
    tokens = made(texts, padding=True, truncation=True, max_length=max_length, return_tensors="pt")
    _check_known(made, tokens, tokenizer)
    return {name: tokens[name] for name in made.model_input_names if name in tokens}


def _check_known(made: Any, tokens: Any, tokenizer: str) -> None:
    """Raise where a tokenizer knows almost none of the words, so that all texts would look alike to the network."""
    unknown = made.unk_token_id
    if unknown is None:
        return
    ids = tokens["input_ids"]
    special = torch.tensor([id_ for id_ in made.all_special_ids if id_ != unknown], dtype=ids.dtype)
    words = ~torch.isin(ids, special)
    if "attention_mask" in tokens:  # the token of padding may be the unknown one
        words &= tokens["attention_mask"].bool()
    count, missing = int(words.sum()), int((words & (ids == unknown)).sum())
    if missing > 0.9 * count:
        raise UsageError(
            f"The tokenizer of {tokenizer} does not know {missing:,} of the {count:,} tokens of these texts, so that "
            f"the network would predict almost the same for all of them. {REMEDY}"
        )
