"""What the tests of the server over a scripted engine share, and those of the stage runner over made-up stages."""

from __future__ import annotations

import os

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


@pytest.fixture
def world(tmp_path, monkeypatch):
    """Made-up stages of which nothing is made, and no waiting for the disk.

    A killed process loses no written byte, only a power cut does; real waits would be most of the time here.
    """
    from tests.unit.stage_world import World

    monkeypatch.setattr(os, "fsync", lambda _fd: None)
    return World(tmp_path)
