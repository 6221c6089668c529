from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.certificates import TOKEN, Authority

from dataservice.actors.member import Member
from dataservice.errors import AccessRefused
from dataservice.rpc.security import ClientSecurity, ServerSecurity
from dataservice.rpc.server import start_server
from dataservice.wire.messages import GetStatus


def test_one_that_is_asked_to_end_before_it_has_joined_ends_in_order() -> None:
    async def run() -> list[Any]:
        stopping = False
        member = Member(
            "127.0.0.1:1",
            security=ClientSecurity(),
            hello=GetStatus,
            joined=lambda _: None,
            stopping=lambda: stopping,
        )
        reading = asyncio.ensure_future(_all(member))
        await asyncio.sleep(0.3)
        stopping = True
        answers = await asyncio.wait_for(reading, 20)
        await member.close()
        return answers

    assert asyncio.run(run()) == []


def test_one_whose_token_is_not_taken_ends_at_once(tmp_path: Path) -> None:
    """Rather than ask until it is orphaned; what keeps it says why."""
    token_file = Authority(tmp_path).token(TOKEN)

    async def run() -> None:
        service = ServerSecurity(token_file=token_file)
        server = await start_server(coordinator=_Nobody(), security=service)  # type: ignore[arg-type]
        member = Member(
            server.endpoint,
            security=ClientSecurity(),
            hello=GetStatus,
            joined=lambda _: None,
            stopping=lambda: False,
        )
        try:
            with pytest.raises(AccessRefused, match="asks for a token"):
                await asyncio.wait_for(_all(member), 20)
        finally:
            await member.close()
            await server.stop(0)

    asyncio.run(run())


class _Nobody:
    def __getattr__(self, name: str) -> Any:
        return lambda _request: pytest.fail(f"{name} must not be called")


async def _all(member: Member) -> list[Any]:
    return [answer async for answer in member.answers(GetStatus)]
