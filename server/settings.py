"""What an operator may set about the HTTP service. Knows nothing of the scheduler's or the engine's own options.

app = create_app(scheduler, Settings(max_body_bytes=1 << 20))
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One frozen value, made once at start.

    `default_max_tokens` bounds chat answers that name no limit. `keepalive_s`: an event stream that has been silent for
    so long gets a comment line. `body_timeout_s`: a body that is not here by then is not waited for. `write_timeout_s`:
    a reader who takes nothing for so long has left. `request_timeout_s`: a connection is closed that has brought no
    whole request by then, unless something is being answered on it. Of `max_connections` more are closed at once: keep
    it below the number of files that the process may open.

    `allowed_hosts` are the values of the Host header that are answered, without the port; none means all. Keep them to
    loopback names on a loopback address, or any web page can reach the server by rebinding its own name to 127.0.0.1.
    `api_keys`: none means that no key is asked for. `cors_origins`: the web pages that may ask, "*" for all.
    `busy_status` refuses for lack of room or time. `store_bytes` bounds the answers that are kept for clients who come
    back to them by id; 0 keeps none. `http_drain` lets whoever may ask end the server with `POST /drain`.
    """

    max_body_bytes: int = 2 << 20
    max_choices: int = 128
    default_max_tokens: int = 1024
    keepalive_s: float = 5.0
    body_timeout_s: float = 30.0
    write_timeout_s: float = 60.0
    request_timeout_s: float = 30.0
    max_connections: int = 900
    drain_timeout_s: float = 30.0
    allowed_hosts: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    busy_status: Literal[429, 503] = 503
    store_bytes: int = 64 << 20
    http_drain: bool = False
