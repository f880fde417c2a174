"""Whether the hub can be reached, asked once and quickly: its own clients try again for a minute before they say so."""

from __future__ import annotations

import functools
import os
import socket
from urllib.parse import urlsplit

_SECONDS = 4.0


@functools.cache
def _unreachable(endpoint: str) -> bool:
    parts = urlsplit(endpoint)
    try:
        socket.create_connection(
            (parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)), _SECONDS
        ).close()
    except OSError:
        return True
    return False


def go_offline_where_there_is_no_hub() -> bool:
    """Tell the hub's clients to look at their cache only where the hub cannot be reached; says whether that is so.

    A machine behind a proxy is not asked: only its proxy knows.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return True
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return False
    if not _unreachable(constants.ENDPOINT):
        return False
    constants.HF_HUB_OFFLINE = True
    return True
