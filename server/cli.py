"""The `tinyloop` command: serve, generate, inspect, trace, calibrate, simulate, version. Loads torch, uvicorn and the
scheduler only when they are needed.

tinyloop serve smollm2 --port 8000
tinyloop generate "The capital of France is" --loops 2
"""

import gc
import json
import math
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from server import cli_model
from server.cli_capacity import add_commands
from server.cli_model import Dtype, Name, WeightsOption
from tinyloop import __version__
from tinyloop.errors import NeverFits, TinyLoopError

if TYPE_CHECKING:
    from server.engine import ModelInfo
    from server.scheduler import DispatchMode, Engine, Scheduler
    from server.settings import Settings
    from tinyloop.model import Model
    from tinyloop.tokenizer import Tokenizer

cli = typer.Typer(name="tinyloop", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_MOST_BYTES = 1 << 62  # more than any machine has, and still a number that can be compared with what it has
SWITCH_S = 0.0005  # that the event loop waits for the interpreter while the engine has it; a tenth of what Python does
UNREAD_MS = 60_000  # how long what was sent may lie unread
PREPARE_S = 1.0  # after the start
CLOSE_S = 5  # how long a client may take to read its last bytes before its connection is cut


def main() -> None:
    """The console script. An error that is meant for people is one line on stderr and exit status 1."""
    try:
        cli()
    except TinyLoopError as error:
        print(f"tinyloop: {error}", file=sys.stderr)
        sys.exit(1)


def _size(text: str) -> int:
    """Bytes of `2GiB`, `512M`, `1.5g` or a plain number."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a size; write it as 512MiB or 2GiB")
    return int(min(float(match[1]) * _UNITS[match[2]], _MOST_BYTES))


def _positive(value: float | None) -> float | None:
    if value is not None and not 0 < value < math.inf:
        raise typer.BadParameter(f"{value:g} is not above 0")
    return value


def _busy(status: int) -> int:
    if status not in (429, 503):
        raise typer.BadParameter(f"{status} is neither 429 nor 503")
    return status


def _mode(text: str) -> "DispatchMode":
    from server.scheduler import DispatchMode

    if text not in list(DispatchMode):
        raise typer.BadParameter(f"{text!r} is not one of {', '.join(DispatchMode)}")
    return DispatchMode(text)


@cli.command()
def serve(
    model: Name = "smollm2",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8000,
    dtype: Dtype = "auto",
    weights: WeightsOption = "auto",
    loops: Annotated[int | None, typer.Option(help="Loops of a request that names none.")] = None,
    dispatch: Annotated[str, typer.Option(help="sequential, homogeneous, interleaved or continuous.")] = "continuous",
    max_queue_depth: Annotated[int, typer.Option(min=1, help="Requests that may wait.")] = 128,
    max_connections: Annotated[int, typer.Option(min=1, help="Connections that may be open at once.")] = 900,
    slo_ms: Annotated[
        float | None, typer.Option(callback=_positive, help="Longest predicted wait of a request that sets none.")
    ] = None,
    min_loops: Annotated[
        int | None, typer.Option(min=1, help="Least loops of a request that names none, when the server is busy.")
    ] = None,
    saturation_ms: Annotated[
        float, typer.Option(callback=_positive, help="Predicted wait above which min_loops is made use of.")
    ] = 5000.0,
    row_budget: Annotated[int, typer.Option(min=1, help="Rows of a step up to which prompts may enter.")] = 512,
    kv_memory: Annotated[str | None, typer.Option(help="Memory for keys and values, such as 2GiB.")] = None,
    max_running: Annotated[int | None, typer.Option(min=1, help="Requests that may run at once.")] = None,
    drain_timeout: Annotated[float, typer.Option(help="Seconds that running requests get at shutdown.")] = 30.0,
    stall_after: Annotated[
        float, typer.Option(callback=_positive, help="Seconds without a step, with work to do, until /health is red.")
    ] = 60.0,
    http_drain: Annotated[bool, typer.Option("--http-drain", help="Let POST /drain end the server.")] = False,
    api_key: Annotated[list[str] | None, typer.Option(help="A key to ask with; may be given again.")] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="A file of keys, one a line.")] = None,
    allow_host: Annotated[list[str] | None, typer.Option(help="A further Host header to answer.")] = None,
    cors_origin: Annotated[list[str] | None, typer.Option(help="A web page's origin that may ask, or *.")] = None,
    busy_status: Annotated[int, typer.Option(callback=_busy, help="Status of a refusal while busy: 429 or 503.")] = 503,
) -> None:
    """Serve a model over HTTP. SIGTERM and Ctrl-C finish what runs; a second one ends at once."""
    from server.scheduler import Engine, Policy, Scheduler
    from server.security import LOOPBACK, read_keys
    from server.settings import Settings

    keys = read_keys(api_key or (), api_key_file)
    address = bind(host, port)  # first, so that a taken port is known before a model has been loaded
    memory = None if kv_memory is None else _size(kv_memory)
    policy = Policy(_mode(dispatch), row_budget=row_budget, max_running=max_running)
    load = partial(Engine.load, model, dtype=dtype, weights=weights, kv_memory=memory, default_loops=loops)
    engine = _while_importing(load)
    _check_memory(engine)
    if min_loops is not None and min_loops > engine.default_loops:
        raise typer.BadParameter(f"--min-loops must be at most {engine.default_loops}, the default loops")
    scheduler = Scheduler(
        engine, max_queue_depth=max_queue_depth, default_slo_ms=slo_ms, policy=policy, default_min_loops=min_loops,
        saturation_ms=saturation_ms, stall_after_s=stall_after,
    )  # fmt: skip
    hosts = (*LOOPBACK, *(allow_host or ())) if host in LOOPBACK else tuple(allow_host or ())
    settings = Settings(
        allowed_hosts=hosts, drain_timeout_s=drain_timeout, http_drain=http_drain, api_keys=keys,
        cors_origins=tuple(cors_origin or ()), max_connections=max_connections,
        busy_status=429 if busy_status == 429 else 503,
    )  # fmt: skip
    run_server(scheduler, settings, address)


def _while_importing(load: Callable[[], "Engine"]) -> "Engine":
    """What `load` returns. Meanwhile what serving needs is imported, which takes about as long."""
    import tinyloop.model  # noqa: F401 - first, so that the two import nothing at once

    with ThreadPoolExecutor(1, "load") as pool:
        loading = pool.submit(load)
        import uvicorn  # noqa: F401

        import server.app  # noqa: F401

        return loading.result()


def _check_memory(engine: "Engine") -> None:
    """Raises TinyLoopError if not even one token fits: the server would start and refuse everybody."""
    from server.types import GenerationRequest

    try:
        engine.prepare(GenerationRequest([0], max_new_tokens=0))
    except NeverFits as error:
        raise TinyLoopError(f"--kv-memory is too small for a single token: {error}") from error


def bind(host: str, port: int) -> socket.socket:
    """The address, taken but not yet answering: who connects now waits. Raises TinyLoopError.

    It listens at once, because SO_REUSEADDR lets two sockets have a port until one of them does. The protocol is
    spelled out because asyncio turns Nagle's algorithm off only where it reads TCP there.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if sys.platform == "linux":  # accepted sockets inherit it: who takes nothing of what was sent is cut off
            bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_MS)
        bound.bind((host, port))
        bound.listen()
    except OSError as error:
        bound.close()
        raise TinyLoopError(f"cannot listen on {host} port {port}: {error.strerror}") from error
    return bound


def run_server(scheduler: "Scheduler", settings: "Settings", address: socket.socket) -> None:
    """Serve until a signal. Returns after the drain."""
    import uvicorn

    from server.app import DrainingServer, create_app
    from server.connections import patient

    sys.setswitchinterval(SWITCH_S)
    app = create_app(scheduler, settings)
    config = uvicorn.Config(app, http=patient(settings), log_level="warning", timeout_graceful_shutdown=CLOSE_S)
    server = DrainingServer(config, scheduler, settings.drain_timeout_s, on_start=partial(_greet, scheduler))
    app.state.start_drain = server.start_drain
    gc.freeze()  # what is there now stays: the collector need not look through all of torch between two tokens
    server.run(sockets=[address])


def _greet(scheduler: "Scheduler", host: str, port: int) -> None:
    print(banner(scheduler.info, host, port), flush=True)
    _later(scheduler.tokenizer)


def _later(tokenizer: "Tokenizer") -> None:
    """What the first answer in a form would wait for, once those who waited for the start have their first token."""
    from tinyloop.constraint import prepare

    timer = threading.Timer(PREPARE_S, prepare, [tokenizer])
    timer.daemon = True
    timer.start()


def banner(info: "ModelInfo", host: str, port: int) -> str:
    """What a person needs to know and can paste."""
    address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    memory = f", {info.kv_memory / (1 << 20):,.0f} MiB for keys and values" if info.kv_memory else ""
    size = f"{info.parameters / 1e6:,.0f}M parameters in {info.weights}"
    message = {"role": "user", "content": "Name the capital of France."}
    body = {"model": info.id, "messages": [message], "loops": info.default_loops, "temperature": 0}
    return (
        f"TinyLoop {__version__} on {address}\n"
        f"{info.id}: {size}, {info.max_context} tokens of context{memory}\n"
        f"loops: {info.min_loops} to {info.max_loops}, default {info.default_loops}\n"
        f"curl {address}/v1/chat/completions -H 'content-type: application/json' -d '{json.dumps(body)}'"
    )


@cli.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue, or to answer.")],
    model: Annotated[str, typer.Option(help="A bundled name, a folder, a GGUF file or a hub id.")] = "smollm2",
    loops: Annotated[int | None, typer.Option(help="Loops per token.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=0, help="Longest answer.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 always takes the likeliest token.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    dtype: Dtype = "auto",
    weights: WeightsOption = "auto",
    chat: Annotated[bool, typer.Option("--chat/--raw", help="Put the prompt into the chat template.")] = False,
    stream: Annotated[bool, typer.Option(help="Print tokens as they come.")] = True,
) -> None:
    """Generate once and print the answer."""
    import tinyloop as tl

    loaded = tl.Model.load(model, dtype=dtype, weights=weights)
    sampling = tl.SamplingParams(temperature=temperature, seed=seed)
    pieces = _pieces(loaded, prompt, chat, {"max_new_tokens": max_new_tokens, "loops": loops, "sampling": sampling})
    for piece in pieces if stream else ["".join(pieces)]:
        print(piece, end="", flush=True)
    print()


def _pieces(model: "Model", prompt: str, chat: bool, options: dict[str, Any]) -> Iterator[str]:
    tokens: Any = model.chat([{"role": "user", "content": prompt}]) if chat else prompt
    for chunk in model.stream(tokens, **options):
        yield chunk.text


@cli.command()
def version() -> None:
    """Print the version."""
    print(__version__)


def _load_engine(name: str, **options: Any) -> "Engine":
    from server.scheduler import Engine

    return Engine.load(name, **options)


add_commands(cli, _load_engine)
cli_model.add_commands(cli, _size)

if __name__ == "__main__":
    main()
