"""The conformance suite for operations: subclass it, make them, run pytest."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import product

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from commutator.contract.operations import Operations, OperationsDoor, OperationsRoute

_DOORS = [
    OperationsDoor(serves_clients=clients, needs_key=key)
    for clients, key in product((True, False), repeat=2)
]


@pytest.mark.asyncio
class OperationsContract:
    """What all operations must do. ``make_operations`` makes those of one front-door process."""

    documented_in = (
        "Operations in docs/reference/contract/operations.md and docs/reference/hooks.md"
    )

    def make_operations(self) -> Operations:
        """New ones, over services that have what their routes use."""
        raise NotImplementedError

    @asynccontextmanager
    async def served(self) -> AsyncIterator[TestClient[web.Request, web.Application]]:
        """A client of the routes, whose rights nobody checks."""
        app = web.Application()
        for one in self.make_operations().routes(_DOORS[0]):
            app.router.add_route(one.method, one.path, one.handle)
        async with TestClient(TestServer(app)) as client:
            yield client

    async def test_every_door_gets_routes_and_no_two_are_the_same(self) -> None:
        """A process has several doors, and asks about each."""
        operations = self.make_operations()
        for door in _DOORS:
            routes = list(operations.routes(door))
            assert all(isinstance(one, OperationsRoute) for one in routes)
            claimed = [(one.method, one.path) for one in routes]
            assert len(set(claimed)) == len(claimed), f"claimed twice: {claimed}"

    async def test_handlers_are_coroutine_functions(self) -> None:
        for one in self.make_operations().routes(_DOORS[0]):
            assert inspect.iscoroutinefunction(one.handle), f"{one.method} {one.path}"

    async def test_what_needs_nothing_is_a_file_that_anyone_may_read(self) -> None:
        """No key is asked for, so it is the same for everyone and changes nothing."""
        for one in self.make_operations().routes(_DOORS[0]):
            if one.needs == "nothing":
                assert one.method == "GET", f"{one.path} needs nothing, so it may only be read"
        files = [
            one
            for one in self.make_operations().routes(_DOORS[0])
            if one.needs == "nothing" and "{" not in one.path
        ]
        async with self.served() as client:
            for one in files:
                first, second = [
                    await client.get(one.path, headers=headers, allow_redirects=False)
                    for headers in ({}, {"Authorization": "Bearer somebody"})
                ]
                assert first.status < 500, f"{one.path} answers {first.status}"
                assert await first.read() == await second.read(), f"{one.path} knows its caller"
