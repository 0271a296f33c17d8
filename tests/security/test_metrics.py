"""Requests cannot add lines to /metrics, and the page shows no secrets and no prompts."""

import re

import httpx

from jaxserve.testing.scripted_text_engine import scripted_text_engine
from server.app import create_app
from server.settings import ApiSettings
from server.state import ServerState

KEY = {"authorization": "Bearer secret-key"}
LABELS = {"model_name", "engine", "le", "finished_reason", "block_size", "num_gpu_blocks"}


def names_of(page: str) -> set[str]:
    """Returns every sample with its labels, without its value."""
    return {line.rpartition(" ")[0] for line in page.splitlines() if not line.startswith("#")}


async def test_requests_add_no_labels() -> None:
    app = create_app(ServerState(scripted_text_engine("hi")), ApiSettings(api_key=("secret-key",)))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://test", headers=KEY
    ) as client:
        before = names_of((await client.get("/metrics")).text)
        for i in range(30):
            odd = f"odd-{i}"
            await client.get(f"/{odd}")
            await client.request(f"M{i}", "/v1/models", headers={"user-agent": odd})
            body = {"prompt": odd, "user": odd, "cache_salt": odd, "request_id": odd}
            for more in ({}, {"model": odd}, {"n": 0}, {"stream": True}):
                headers = {"x-request-id": odd}
                await client.post("/v1/completions", json={**body, **more}, headers=headers)
        page = (await client.get("/metrics")).text
    assert names_of(page) == before
    assert len(before) > 100
    assert set(re.findall(r'[{,](\w+)="', page)) <= LABELS
    assert "odd-" not in page
    assert "secret-key" not in page
