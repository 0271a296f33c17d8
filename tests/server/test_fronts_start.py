"""Many front processes: other tasks run between their starts, so that a signal ends the start."""

import asyncio

from server.fronts import Fronts


class FakeFront:
    def __init__(self, up):
        self.up = up

    async def remove(self):
        return []


async def test_a_start_of_many_fronts_can_be_cancelled(monkeypatch) -> None:
    made = []

    def new_front(fronts, index):
        made.append(FakeFront(asyncio.get_running_loop().create_future()))
        return made[-1]

    monkeypatch.setattr(Fronts, "_new_front", new_front)
    ended = []
    fronts = Fronts(
        64,
        [],
        launch=lambda index, reader: None,
        on_begin=lambda reader: [],
        on_end=ended.append,
        max_restarts=1,
    )
    starting = asyncio.create_task(fronts.start())
    while not made:
        await asyncio.sleep(0)
    starting.cancel()
    await asyncio.wait([starting])
    assert 0 < len(made) < 64
    await fronts.close()
    assert ended == made
