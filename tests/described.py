"""The server held to its own description by schemathesis: `make schemathesis`.

Starts a server with a tiny model, and lets schemathesis send what the description allows and what it forbids. Not a
test file: it takes minutes, and an environment of its own (`.peers/schemathesis`), whose command is the argument.
"""

import json
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

from tests.http_support import python_process

SERVER = """
import os
os.dup2(os.open("{log}", os.O_WRONLY | os.O_CREAT), 2)  # a pipe that nobody reads would hold the server up
from server.cli import bind, run_server
from server.engine import Engine
from server.scheduler import Scheduler
from server.settings import Settings
from tests.tiny_models import tiny_model
settings = Settings(default_max_tokens=16, drain_timeout_s=2, body_timeout_s=5)
run_server(Scheduler(Engine(tiny_model("ouro"))), settings, bind("127.0.0.1", 0))
"""
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
OPTIONS = f"--checks {CHECKS} --phases examples,coverage,fuzzing --request-timeout 20 --continue-on-failure".split()
MEANT = '[checks]\nnot_a_server_error.expected-statuses = ["2xx", "3xx", "4xx", 501, 503]\n'  # not offered; no room
LEFT_OUT = ("/drain", "/tinyloop/v1/scheduler/events")  # the one ends the server, the other never ends


def with_a_model(value: Any) -> Any:
    """The description in which every `model` of a body is the one that is served: else nearly all are 404."""
    if isinstance(value, list):
        return [with_a_model(item) for item in value]
    if not isinstance(value, dict):
        return value
    found = {name: with_a_model(item) for name, item in value.items()}
    if isinstance(fields := found.get("properties"), dict):
        found["properties"] = fields | {
            name: {"const": "tiny", "type": "string"} for name in ("model", "instance_id") if name in fields
        }
    return found


def main(schemathesis: str, arguments: list[str]) -> int:
    with (
        tempfile.TemporaryDirectory() as work,
        python_process(SERVER.format(log=f"{work}/stderr")) as (_, address),
    ):
        with urllib.request.urlopen(f"{address}/openapi.json") as response:
            document = json.load(response)
        for operation in (one for path in document["paths"].values() for one in path.values()):
            if "requestBody" in operation:
                operation["requestBody"] = with_a_model(operation["requestBody"])
        description = Path(work) / "openapi.json"
        description.write_text(json.dumps(document))
        settings = Path(work) / "schemathesis.toml"
        settings.write_text(MEANT)
        command = [schemathesis, "--config-file", str(settings), "run", str(description), "--url", address, *OPTIONS]
        command += [word for path in LEFT_OUT for word in ("--exclude-path", path)]
        failed = subprocess.run([*command, *arguments]).returncode
        told = (Path(work) / "stderr").read_text()
        print(told, file=sys.stderr)
        return failed or "Traceback" in told


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
