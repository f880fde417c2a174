"""Names of the hub: what is one, and whether it can be read from here."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path
from urllib.parse import urlsplit

from ..errors import NotFound

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_WAIT = 3.0  # seconds for one connection; without it, libraries try for minutes


def check_id(name: str, kind: str, *, file: str | None = None, revision: str | None = None) -> None:
    """Refuse a name that is no hub id, and a hub id while the hub cannot be reached; one attempt, no retry.

    A hub id is ``owner/name`` where ``owner`` is no folder here. The hub is not asked where the cache has that file of it.
    """
    from huggingface_hub import constants, try_to_load_from_cache

    if not _ID.fullmatch(name) or Path(name.split("/")[0]).is_dir():
        raise NotFound(
            f"There is no {kind} {name!r} here, and that is no hub id.",
            "A dataset is stdlib, c4, wikitext2, a local path or owner/name."
            if kind == "dataset"
            else "MODEL is demo, a local folder, a GGUF file or owner/name.",
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
            f"{name} is not in the cache, and the hub cannot be reached ({error}).",
            "",
            "Give a local folder, or download it first where there is a network.",
        ) from error
