"""Who gets the live page and its data, and how its files travel."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from headrace.api.app import create_app
from headrace.api.exchange import Exchanges
from headrace.api.service import Service
from headrace.config import Settings, is_loopback
from headrace.engine.client import EngineClient
from headrace.observe.metrics import ApiMetrics
from headrace.sources.card import read_card
from headrace.sources.files import ModelFiles
from headrace.text.tokenizer import load_tokenizer
from headrace.web_page import FOLDER, load_files

FILES = ModelFiles("fake", "fake", Path())
HERE = "http://127.0.0.1:8000"


@asynccontextmanager
async def client(base_url: str = HERE, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    """Of a server with these settings, without an engine."""
    metrics = ApiMetrics("fake", CollectorRegistry())
    card, tokenizer = read_card(FILES), load_tokenizer(FILES)
    service = Service(Settings(**settings), "fake", card, tokenizer, EngineClient(Path()), metrics)
    app: Any = create_app(service, Exchanges(60, 15, lambda: None))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url=base_url) as made:
        yield made


async def test_the_page_and_all_that_it_names() -> None:
    async with client() as http:
        page = await http.get("/ui")
        assert page.status_code == 200
        assert page.headers["content-type"].startswith("text/html")
        named = re.findall(r'(?:href|src)="(ui/[^"]+)"', page.text)
        assert len(named) > 5
        for path in named:
            found = await http.get("/" + path)
            assert found.status_code == 200, path
            assert "immutable" in found.headers["cache-control"]
        version, files = load_files()
        for name in files:
            assert (await http.get(f"/ui/files/{version}/{name}")).status_code == 200
        moved = await http.get("/ui/")
        assert (moved.status_code, moved.headers["location"]) == (308, "../ui")


async def test_it_is_asked_for_again_but_sent_once() -> None:
    async with client() as http:
        first = await http.get("/ui")
        assert first.headers["cache-control"] == "no-cache"
        etag = first.headers["etag"]
        again = await http.get("/ui", headers={"if-none-match": f"W/{etag}"})
        assert (again.status_code, again.content) == (304, b"")
        other = await http.get("/ui", headers={"if-none-match": '"other"'})
        assert other.status_code == 200


@pytest.mark.parametrize(
    "path", ["files/{version}/js/none.js", "files/0/js/main.js", "files/{version}/../api/page.py"]
)
async def test_no_other_files(path: str) -> None:
    async with client() as http:
        found = await http.get("/ui/" + path.format(version=load_files()[0]))
        assert found.status_code == 404


async def test_nothing_but_its_own_scripts_runs() -> None:
    async with client() as http:
        page = await http.get("/ui")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self'" in policy
    assert "unsafe" not in policy
    assert "require-trusted-types-for 'script'" in policy
    assert page.headers["x-content-type-options"] == "nosniff"
    assert not re.search(r"<script(?![^>]* src=)|<style|\son\w+=|\sstyle=", page.text)


def test_its_files_name_no_other_host_and_take_no_markup() -> None:
    forbidden = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function"
    )
    for path in FOLDER.rglob("*.*"):
        text = path.read_text()
        urls = set(re.findall(r"https?://[^\s\"')]+", text)) - {"http://www.w3.org/2000/svg"}
        assert not urls, path
        assert not forbidden.search(text), path


async def test_off() -> None:
    async with client(ui=False) as http:
        assert (await http.get("/ui")).status_code == 404
        assert (await http.get(f"/ui/files/{load_files()[0]}/js/main.js")).status_code == 404


@pytest.mark.parametrize(
    ("settings", "url", "headers", "status"),
    [
        ({}, HERE, {}, 200),
        ({}, "http://localhost:8000", {}, 200),
        ({}, "http://[::1]:8000", {}, 200),
        ({"host": "::1"}, "http://[::1]:8000", {}, 200),
        ({}, HERE, {"origin": HERE}, 200),
        # a name of somebody's that leads here, and another page of the same browser
        ({}, "http://evil.example:8000", {}, 403),
        ({}, HERE, {"origin": "http://evil.example"}, 403),
        ({"cors_origin": ("*",)}, HERE, {"origin": "http://evil.example"}, 403),
        # a picture or a frame of another site's page names no origin; a link leads here
        ({}, HERE, {"sec-fetch-site": "cross-site", "sec-fetch-dest": "image"}, 403),
        ({}, HERE, {"sec-fetch-site": "same-site", "sec-fetch-dest": "iframe"}, 403),
        ({}, HERE, {"sec-fetch-site": "cross-site", "sec-fetch-dest": "document"}, 200),
        ({}, HERE, {"sec-fetch-site": "same-origin", "sec-fetch-dest": "script"}, 200),
        ({"host": "0.0.0.0"}, HERE, {}, 403),
        ({"host": "10.0.0.7"}, "http://10.0.0.7:8000", {}, 403),
        # with a key the page itself, which holds nothing, goes to everybody
        ({"api_key": ("k",)}, "http://evil.example:8000", {}, 200),
        ({"api_key": ("k",), "host": "0.0.0.0"}, "http://10.0.0.7:8000", {}, 200),
    ],
)
async def test_who_gets_the_page(
    settings: dict[str, Any], url: str, headers: dict[str, str], status: int
) -> None:
    async with client(url, **settings) as http:
        answer = await http.get("/ui", headers=headers)
    assert answer.status_code == status
    if status == 403:
        assert answer.json()["error"]["code"] == "forbidden"


async def test_data_needs_the_key() -> None:
    async with client(api_key=("k",)) as http:
        for path in ("/ui/api/stages", "/ui/api/", "/ui/api/anything"):
            assert (await http.get(path)).status_code == 401
            known = await http.get(path, headers={"authorization": "Bearer k"})
            assert known.status_code != 401
        assert (await http.get("/uix")).status_code == 401, "a path that only begins like it"


async def test_it_is_no_part_of_the_openapi_document() -> None:
    async with client() as http:
        document = (await http.get("/openapi.json")).json()
    assert not [path for path in document["paths"] if path.startswith("/ui")]


def test_loopback() -> None:
    assert all(map(is_loopback, ["127.0.0.1", "127.9.9.9", "::1", "localhost", "LOCALHOST"]))
    assert not any(map(is_loopback, ["", "0.0.0.0", "::", "10.0.0.1", "localhost.evil.example"]))


def test_the_pictures_of_its_docs() -> None:
    docs = Path(__file__).parents[2] / "docs"
    shown = re.findall(r"\]\((ui/[\w-]+\.png)\)", (docs / "ui.md").read_text())
    shown += re.findall(r"\]\((ui/[\w-]+\.png)\)", (docs / "gateway-page.md").read_text())
    assert {str(path.relative_to(docs)) for path in (docs / "ui").iterdir()} == set(shown)
    for name in shown:
        assert (docs / name).stat().st_size < 300_000, name
