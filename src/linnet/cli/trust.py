"""Which runs this user has made: run.json is signed with a key of the user.

`linnet predict` imports the code that run.json names. A run that another user has made, or that was changed later, may
name any code, so the user has to say that the run is trusted.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import warnings
from pathlib import Path

LENGTH = 32
"""Bytes of a key."""


def sign(text: str) -> str | None:
    """Sign a text with the user's key. A missing key is made; the result is None where no key can be made."""
    try:
        key = _read_key(make=True)
    except (OSError, RuntimeError) as error:
        warnings.warn(
            f"The run is not signed, because the key of this user cannot be stored ({error}). linnet predict will ask "
            "for --trust.",
            stacklevel=2,
        )
        return None
    assert key is not None
    return _compute_signature(key, text)


def is_own(text: str, signature: str | None) -> bool:
    """Whether this user's key made a signature."""
    try:
        key = _read_key(make=False)
    except (OSError, RuntimeError):
        return False
    return key is not None and signature is not None and hmac.compare_digest(_compute_signature(key, text), signature)


def key_path() -> Path:
    """The path of the user's key: ``linnet/key`` in the folder of settings, by default ``~/.config``."""
    base = os.environ.get("XDG_CONFIG_HOME") or os.environ.get("APPDATA") or Path.home() / ".config"
    return Path(base) / "linnet" / "key"


def _compute_signature(key: bytes, text: str) -> str:
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def _read_key(*, make: bool) -> bytes | None:
    path = key_path()
    if make and not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = path.with_name(f".key.{secrets.token_hex(4)}.tmp")
        try:
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(secrets.token_bytes(LENGTH))
            try:
                os.link(
                    temporary, path
                )  # a complete file, which never replaces a key that another process has just made
            except FileExistsError:
                pass
            except OSError:  # a file system without links
                os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    if not path.exists():
        return None
    key = path.read_bytes()
    if len(key) != LENGTH:
        raise OSError(f"{path} has {len(key)} bytes, but a key has {LENGTH}; remove the file")
    return key
