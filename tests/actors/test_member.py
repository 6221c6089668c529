from __future__ import annotations

import asyncio
from typing import Any

from dataservice.actors.member import Member
from dataservice.rpc.security import ClientSecurity
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


async def _all(member: Member) -> list[Any]:
    return [answer async for answer in member.answers(GetStatus)]
