"""What several test files share."""

from pathlib import Path

import pytest

from tinyloop.checkpoint import builtin


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The real built-in model, fetched into the user's cache the way a server would."""
    return builtin.fetch(builtin.BUILTINS["smollm2"])
