"""One server for all of these tests."""

from collections.abc import Iterator

import pytest

from tests.clients.support import SERVER
from tests.http_support import python_process


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    """Where the OpenAI API of a running server is."""
    with python_process(SERVER) as (_, address):
        yield f"{address}/v1"
