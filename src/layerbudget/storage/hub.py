"""When the network is asked: for a hub id only, and only while the hub can be reached.

A name is a hub id when it reads ``owner/name`` and ``owner`` is no folder here, or when it is one of the old names without an
owner. Anything else is a name of something local that was mistyped. What is in the cache already is never asked for.
"""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path
from urllib.parse import urlsplit

from ..errors import NotFound

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# Repositories that had no owner; the hub still knows them by these names.
_OLD = re.compile(
    r"(distil)?gpt2(-medium|-large|-xl)?|openai-gpt|(distil)?(ro)?bert[\w-]*|xlm-roberta-\w+|albert-\w+-v\d|t5-\w+|"
    r"wikitext|c4|glue|super_glue|squad|imdb|ag_news|boolq|ptb_text_only"
)
_WAIT = 3.0  # seconds for one connection; without it, libraries try for minutes


def is_id(name: str) -> bool:
    """Whether a name means a repository on the hub.

    >>> [is_id(n) for n in ("owner/model", "gpt2", "modle", "a/b/c", "./x")]
    [True, True, False, False, False]
    """
    if _OLD.fullmatch(name):
        return True
    return bool(_ID.fullmatch(name)) and not Path(name.split("/")[0]).is_dir()


def check_id(name: str, kind: str, *, file: str | None = None, revision: str | None = None) -> None:
    """Refuse a name that is no hub id, and a hub id while the hub cannot be reached; one attempt, no retry.

    Args:
        name: What the user wrote.
        kind: ``model`` or ``dataset``.
        file: A file whose presence in the cache makes the network needless.
        revision: Revision of that file.

    Raises:
        NotFound: Says which of the two.
    """
    from huggingface_hub import constants, try_to_load_from_cache

    if not is_id(name):
        raise NotFound(
            f"There is no {kind} {name!r} here, and that is no hub id.",
            f"A {kind} is a local path or owner/name." if kind == "dataset" else "MODEL is demo, a local folder or owner/name.",
            "Check the name.",
        )
    if file is not None and isinstance(try_to_load_from_cache(name, file, revision=revision), str):
        return
    if constants.HF_HUB_OFFLINE:
        raise NotFound(f"{name} is not in the cache, and the hub is switched off (HF_HUB_OFFLINE).", "", "Give a local folder.")
    if any(os.environ.get(v) for v in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return  # the proxy decides
    where = urlsplit(constants.ENDPOINT)
    try:
        socket.create_connection((where.hostname or "", where.port or 443), timeout=_WAIT).close()
    except OSError as error:
        raise NotFound(
            f"{name} is not in the cache, and the hub cannot be reached ({error}).", "",
            "Give a local folder, or download it first where there is a network.",
        ) from error  # fmt: skip
