"""The `tinyloop` command, with a model that answers from a script."""

import asyncio
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

import server.cli
import tinyloop
from server.cli import cli, main
from server.scheduler import Engine, Scheduler
from server.security import LOOPBACK
from tests.http_support import INFO, ScriptedEngine
from tests.tiny_models import tiny_model
from tinyloop import __version__
from tinyloop.errors import CheckpointError, TinyLoopError


def run(*arguments: str) -> Any:
    return CliRunner().invoke(cli, list(arguments))


class ScriptedModel:
    """Remembers what it was asked, and says two words."""

    calls: list[Any]

    @classmethod
    def load(cls, name: str, *, dtype: str, weights: str) -> "ScriptedModel":
        if name == "missing":
            raise CheckpointError("missing: no such model")
        model = cls()
        cls.calls = [(name, dtype, weights)]
        return model

    def chat(self, messages: Any) -> list[int]:
        self.calls.append(messages)
        return [1, 2, 3]

    def stream(self, prompt: Any, **options: Any) -> Iterator[Any]:
        self.calls.append((prompt, options))
        yield from (SimpleNamespace(text="Hello "), SimpleNamespace(text="world"))


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> type[ScriptedModel]:
    monkeypatch.setattr(tinyloop, "Model", ScriptedModel)
    return ScriptedModel


@pytest.mark.parametrize("flag", ["--stream", "--no-stream"])
def test_generate_prints_the_answer(model: type[ScriptedModel], flag: str) -> None:
    result = run("generate", "Hi", "--loops", "2", "--model", "m", "--max-new-tokens", "9", "--temperature", "0", flag)
    assert result.output == "Hello world\n"
    assert model.calls[0] == ("m", "auto", "auto")
    prompt, options = model.calls[-1]
    assert prompt == "Hi"
    assert (options["loops"], options["max_new_tokens"], options["sampling"].temperature) == (2, 9, 0)


def test_generate_puts_a_chat_into_the_template(model: type[ScriptedModel]) -> None:
    run("generate", "Hi", "--chat")
    assert model.calls[1] == [{"role": "user", "content": "Hi"}]
    assert model.calls[2][0] == [1, 2, 3]


def test_an_error_is_one_line_and_status_one(
    model: type[ScriptedModel], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tinyloop", "generate", "Hi", "--model", "missing"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 1
    assert capsys.readouterr().err == "tinyloop: missing: no such model\n"


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `serve` loads and runs, without doing either."""
    seen: dict[str, Any] = {}

    def load(name: str, **options: Any) -> ScriptedEngine:
        seen.update(name=name, **options)
        engine: Any = ScriptedEngine()
        engine.prepare = lambda req: None
        engine.default_loops = 4
        return engine

    def run_server(scheduler: Scheduler, settings: Any, address: tuple[str, int]) -> None:
        seen.update(scheduler=scheduler, settings=settings, address=address)

    monkeypatch.setattr(Engine, "load", load)
    monkeypatch.setattr(server.cli, "bind", lambda host, port: (host, port))
    monkeypatch.setattr(server.cli, "run_server", run_server)
    return seen


def test_serve_passes_on_what_holds_under_pressure(served: dict[str, Any]) -> None:
    options = "--min-loops 2 --saturation-ms 900 --stall-after 7 --http-drain"
    assert run("serve", *options.split()).exit_code == 0
    scheduler = served["scheduler"]
    assert (scheduler.stall_after_s, served["settings"].http_drain) == (7, True)
    assert scheduler.door.ceilings.saturation_ms == 900
    refused = run("serve", "--min-loops", "5")
    assert refused.exit_code == 2
    assert "--min-loops must be at most 4" in " ".join(refused.output.split())


def test_serve_listens_on_loopback_and_answers_only_to_its_names(served: dict[str, Any]) -> None:
    assert run("serve").exit_code == 0
    assert (served["name"], served["address"]) == ("smollm2", ("127.0.0.1", 8000))
    assert served["settings"].allowed_hosts == LOOPBACK
    assert run("serve", "--host", "0.0.0.0").exit_code == 0
    assert served["settings"].allowed_hosts == ()


def test_serve_passes_on_who_may_ask(served: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("b\n")
    options = f"--api-key a --api-key-file {tmp_path / 'keys'} --allow-host box --cors-origin * --busy-status 429"
    options += " --max-connections 7"
    assert run("serve", *options.split()).exit_code == 0
    settings = served["settings"]
    assert (settings.api_keys, settings.cors_origins, settings.busy_status) == (("a", "b"), ("*",), 429)
    assert (settings.allowed_hosts, settings.max_connections) == ((*LOOPBACK, "box"), 7)


def test_serve_passes_its_options_on(served: dict[str, Any]) -> None:
    options = "--dtype float32 --loops 3 --max-queue-depth 5 --slo-ms 250 --kv-memory 1.5GiB --max-running 2 --port 0"
    assert run("serve", "m", *options.split()).exit_code == 0
    assert (served["name"], served["dtype"], served["default_loops"]) == ("m", "float32", 3)
    assert served["kv_memory"] == 3 << 29
    assert served["scheduler"].admission.max_queue_depth == 5
    assert served["scheduler"].admission.default_slo_ms == 250


@pytest.mark.parametrize(
    "options",
    [
        ("--kv-memory", "lots"),
        ("--dispatch", "random"),
        ("--busy-status", "500"),
        ("--max-queue-depth", "0"),
        ("--slo-ms", "0"),
        ("--slo-ms", "-1"),
        ("--slo-ms", "nan"),
    ],
)
def test_a_wrong_option_is_a_usage_error(served: dict[str, Any], options: tuple[str, ...]) -> None:
    result = run("serve", *options)
    assert result.exit_code == 2
    assert "Usage" in result.output
    assert not served


def test_a_taken_port_is_one_line_and_no_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(sys, "argv", ["tinyloop", "serve", "missing", "--port", str(port)])
        with pytest.raises(SystemExit) as caught:
            main()
    assert caught.value.code == 1
    assert capsys.readouterr().err == f"tinyloop: cannot listen on 127.0.0.1 port {port}: Address already in use\n"


def test_of_two_servers_on_one_port_the_second_fails_at_once() -> None:
    with server.cli.bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(TinyLoopError, match=f"cannot listen on 127.0.0.1 port {port}: Address already in use"):
            server.cli.bind("127.0.0.1", port)


async def test_answers_leave_without_waiting_for_more_to_send() -> None:
    seen: asyncio.Queue[int] = asyncio.Queue()

    def connected(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.put_nowait(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    address = server.cli.bind("127.0.0.1", 0)
    async with await asyncio.start_server(connected, sock=address):
        _, writer = await asyncio.open_connection(*address.getsockname())
        assert await asyncio.wait_for(seen.get(), 5) != 0
        writer.close()
        await writer.wait_closed()


def test_memory_that_holds_no_token_is_said_before_anybody_is_answered(served: dict[str, Any]) -> None:
    engine = Engine(tiny_model("ouro", pages=3))  # a token takes a page in each of its 4 planes
    with pytest.raises(TinyLoopError, match=r"--kv-memory is too small for a single token: .* 4 KV pages"):
        server.cli._check_memory(engine)
    server.cli._check_memory(Engine(tiny_model("ouro", pages=4)))


@pytest.mark.parametrize(
    ("text", "size"),
    [("1024", 1024), ("2k", 2048), ("1MiB", 1 << 20), ("1.5 GB", 3 << 29), ("1g", 1 << 30), ("9" * 400, 1 << 62)],
)
def test_sizes_are_read_as_people_write_them(text: str, size: int) -> None:
    assert server.cli._size(text) == size


def test_the_banner_tells_address_model_depth_and_a_line_to_paste() -> None:
    banner = server.cli.banner(INFO, "::1", 8000)
    assert "http://[::1]:8000" in banner
    assert "loops: 1 to 8, default 4" in banner
    assert banner.splitlines()[-1].startswith("curl http://[::1]:8000/v1/chat/completions")
    assert f'"model": "{INFO.id}"' in banner


def test_version_and_help_come_without_torch() -> None:
    code = (
        "import sys; from server.cli import cli; cli(['--help'], standalone_mode=False); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("False")
    assert "serve" in done.stdout
    assert run("version").output == f"{__version__}\n"
