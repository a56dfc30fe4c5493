"""What the tests of the server over a scripted engine share."""

from __future__ import annotations

import pytest

# stub_server is imported where it is used: its clients take seconds to import, which most unit tests do not need


@pytest.fixture(scope="module")
def codec(tiny_qwen, tmp_path_factory):
    """A codec that can think and call tools."""
    from tests.unit.stub_server import make_codec

    return make_codec(tiny_qwen, tmp_path_factory.mktemp("codec"))


@pytest.fixture
def engine(codec):
    """An engine that says "Hello there." until a test gives it another script."""
    from tests.unit.stub_server import StubEngine

    return StubEngine(codec)


@pytest.fixture
def server(engine):
    """A server of that engine, stopped after the test."""
    from tests.unit.stub_server import StubServer

    with StubServer(engine) as running:
        yield running
