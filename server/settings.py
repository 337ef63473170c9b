"""What an operator may set about the HTTP service. Knows nothing of the scheduler's or the engine's own options.

app = create_app(scheduler, Settings(max_body_bytes=1 << 20))
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One frozen value, made once at start.

    `default_max_tokens` bounds chat answers that name no limit. `keepalive_s`: an event stream that has been silent for
    so long gets a comment line. `allowed_hosts` are the values of the Host header that are answered, without the port;
    none means all. Keep them to loopback names on a loopback address, or any web page can reach the server by
    rebinding its own name to 127.0.0.1. `salt_by_key` keeps the prefixes of different API keys apart.
    `http_drain` lets whoever can reach the server end it with `POST /drain`.
    """

    max_body_bytes: int = 2 << 20
    max_choices: int = 128
    default_max_tokens: int = 1024
    keepalive_s: float = 5.0
    drain_timeout_s: float = 30.0
    allowed_hosts: tuple[str, ...] = ()
    salt_by_key: bool = False
    http_drain: bool = False


LOOPBACK = ("127.0.0.1", "localhost", "[::1]", "::1")
