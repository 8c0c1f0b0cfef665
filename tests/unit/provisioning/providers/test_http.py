"""What the error answers of each cloud's API mean, and how the key is sent."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from provisioning.errors import (
    NoCapacity,
    OutcomeUnknown,
    ProviderError,
    TooManyRequests,
    Unavailable,
    UserError,
)
from provisioning.providers.http import NotFound
from provisioning.providers.lambda_cloud import LambdaProvider
from provisioning.providers.runpod import RunPodProvider
from provisioning.providers.vast import VastProvider

httpx = pytest.importorskip("httpx", reason="the package httpx is not installed")


async def asked(monkeypatch, kind, status, body, *, is_order=False):
    """What a request to this kind of cloud returns or raises after such an answer, and the headers that it sent."""
    headers = {}

    def answer(request):
        headers.update(request.headers)
        return httpx.Response(status, **({"content": body} if isinstance(body, bytes) else {"json": body}))

    transport = httpx.MockTransport(answer)
    with monkeypatch.context() as patched:
        patched.setattr(httpx, "AsyncClient", functools.partial(httpx.AsyncClient, transport=transport))
        cloud = kind({kind.key_env: "secret"}, Path("key"))
        try:
            return await cloud.request("POST", "/pods", {}, is_order=is_order), headers
        except (ProviderError, UserError) as error:
            return error, headers
        finally:
            await cloud.close()


def of_lambda(code):
    return {"error": {"code": code, "message": "no"}}


def of_vast(code):
    return {"success": False, "error": code, "msg": "no"}


CASES = {
    # The API, its answer, and the error that the answer means for an order and for any other request.
    "lambda: no room": (
        LambdaProvider,
        400,
        of_lambda("launch/insufficient-capacity"),
        NoCapacity,
        ProviderError,
    ),
    "lambda: other region": (
        LambdaProvider,
        400,
        of_lambda("file-system-in-wrong-region"),
        NoCapacity,
        ProviderError,
    ),
    "lambda: bad key": (LambdaProvider, 403, of_lambda("global/invalid-api-key"), UserError, UserError),
    "lambda: quota": (LambdaProvider, 400, of_lambda("global/quota-exceeded"), UserError, UserError),
    "lambda: unknown id": (
        LambdaProvider,
        400,
        of_lambda("global/object-does-not-exist"),
        NoCapacity,
        NotFound,
    ),
    "lambda: wrong field": (
        LambdaProvider,
        400,
        of_lambda("global/invalid-parameters"),
        ProviderError,
        ProviderError,
    ),
    "vast: taken": (VastProvider, 404, of_vast("no_such_ask"), NoCapacity, NotFound),
    "vast: taken back": (VastProvider, 410, of_vast(""), NoCapacity, ProviderError),
    "vast: no money": (VastProvider, 400, of_vast("insufficient_credit"), UserError, UserError),
    "runpod: no room": (RunPodProvider, 400, {"title": "Bad Request"}, NoCapacity, ProviderError),
    "runpod: not for this account": (RunPodProvider, 403, {"title": "Forbidden"}, NoCapacity, UserError),
    "runpod: wrong field": (RunPodProvider, 422, {"title": "Unprocessable"}, ProviderError, ProviderError),
    "of no known form": (RunPodProvider, 404, [], NoCapacity, Unavailable),
    "too fast": (
        LambdaProvider,
        429,
        of_lambda("global/too-many-requests"),
        TooManyRequests,
        TooManyRequests,
    ),
    "timed out": (RunPodProvider, 408, {}, OutcomeUnknown, Unavailable),
    "broken": (VastProvider, 502, of_vast("oops"), OutcomeUnknown, Unavailable),
    "unauthorized": (VastProvider, 401, of_vast("auth_error"), UserError, UserError),
}


@pytest.mark.parametrize("case", CASES)
async def test_an_error_answer_is_the_error_that_says_what_to_do(case, monkeypatch):
    kind_of_cloud, status, body, of_order, of_request = CASES[case]
    for is_order, kind in ((True, of_order), (False, of_request)):
        error, _ = await asked(monkeypatch, kind_of_cloud, status, body, is_order=is_order)
        assert type(error) is kind, error


@pytest.mark.parametrize("content", [b"[" * 100_000, b'{"id": 1', b"<html>"])
async def test_an_answer_that_cannot_be_read_is_a_lost_one(content, monkeypatch):
    error, _ = await asked(monkeypatch, RunPodProvider, 200, content, is_order=True)
    assert type(error) is OutcomeUnknown, error


async def test_the_key_is_sent_as_the_api_wants_it(monkeypatch):
    answer, headers = await asked(monkeypatch, VastProvider, 200, {"pods": []})
    assert (answer, headers["authorization"]) == ({"pods": []}, "Bearer secret")
